"""The "ground" of a study: the code, config files, package versions, weights and prompts that its results depend on.

A study is continued only if its ground is unchanged. Other files in a checkout, such as notebooks, are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_lab.core.errors import KERNELS
from spec_lab.core.regular import open_regular, regular_text
from spec_lab.menu import registry
from spec_lab.program.options import conf_folder
from spec_lab.record.provenance import package_versions
from spec_lab.record.recorder import write_json

GROUND_FILE = "stands_on.json"
READ_WHOLE = 2**24
"""Number of bytes up to which a file is read whole. Of a larger file, only its size and evenly spaced pieces are read:
weights that were trained further usually differ in these too."""
NUM_PIECES, PIECE = 64, 2**16
NOT_READ = ("__pycache__",)
SOURCES = (".py", ".yaml", ".yml", ".json", ".jsonl", ".c", ".h", ".txt", ".safetensors")
NAMED = 3

Ground = Mapping[str, str]
"""A short digest or a version, by the name of the file or package."""


def ground_of(content: Any, extensions: tuple[str, ...]) -> Ground:
    """Return the ground of a study.

    Args:
        content: the runs as plain values; the files and folders that they name, such as weights, belong to the ground.
        extensions: the extension modules given on the command line.
    """
    digests: dict[str, set[str]] = {}
    for key, path in _paths_in(content):
        digests.setdefault(key, set()).add(_digest_of(path))
    named = {key: "+".join(sorted(found)) for key, found in digests.items()}  # paths of one key may end alike
    folders = {"spec_lab": Path(__file__).parents[1], "conf": conf_folder(), **_kernels()}
    folders |= dict(_modules(extensions))
    sources = {name: digest for top, folder in folders.items() for name, digest in _tree(top, folder)}
    return {name: str(version) for name, version in package_versions().items()} | sources | named


def changes(before: Ground, now: Ground) -> str | None:
    """Return the first three names that have changed and the number of others; None if nothing has changed."""
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if not changed:
        return None
    more = len(changed) - NAMED
    return f"{', '.join(changed[:NAMED])}{f' and {more} more' if more > 0 else ''}"


def read_ground(folder: Path) -> Ground | None:
    """Read the ground of the study in `folder`; None if there is no such file, or it cannot be read."""
    with suppress(OSError, ValueError):
        values = json.loads(regular_text(folder / GROUND_FILE))
        if isinstance(values, dict):
            return values
    return None


def keep_ground(folder: Path, ground: Ground) -> None:
    """Write the ground into a study's folder, unless one can be read there."""
    if read_ground(folder) is None:
        write_json(folder / GROUND_FILE, ground)


def _kernels() -> dict[str, Path]:
    spec = find_spec(KERNELS)
    return {} if spec is None or spec.origin is None else {KERNELS: Path(spec.origin).parent}


def _modules(extensions: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for extension in registry.load(extensions).extensions:
        file = getattr(extension.module, "__file__", None)
        if file is not None:
            path = Path(file)
            yield extension.name, path.parent if path.name == "__init__.py" else path


def _tree(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield each source file of a package, or of a module with one file, with its digest."""
    if not path.is_dir():
        yield name, _digest(path)
        return
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        if file.suffix in SOURCES and not set(NOT_READ) & set(inside.parts):
            yield f"{name}/{inside.as_posix()}", _digest(file)


def _paths_in(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the existing files and folders that a value names, as in `KEY=PATH[,PATH]`, with a name for each.

    The values of `output_dir` and of Hydra's keys are left out.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _paths_in(item, f"{key}.{name}".strip("."))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _paths_in(item, key)
    elif isinstance(value, str):
        name, is_override, typed = value.lstrip("+").partition("=")
        name, text = (name, typed) if is_override and not key else (key, value)
        if name and name != "output_dir" and not name.startswith("hydra"):
            for part in text.split(","):
                path = Path(part.strip("[]'\" "))
                with suppress(OSError, ValueError):
                    if ("/" in part or path.suffix or "path" in name) and path.exists():
                        yield f"{name}={path.name}", path


def _digest_of(path: Path) -> str:
    """Return the digest of a file, or of the files in a checkpoint's folder, without its subfolders."""
    if not path.is_dir():
        return _digest(path)
    files = {file.name: _digest(file) for file in sorted(path.iterdir()) if not file.is_dir()}
    return _short(json.dumps(files).encode())


def _digest(path: Path) -> str:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            starts: Iterable[int] = [0]
            if size > READ_WHOLE:
                starts = (index * (size - PIECE) // (NUM_PIECES - 1) for index in range(NUM_PIECES))
            content = hashlib.sha256(str(size).encode())
            for start in starts:
                file.seek(start)
                content.update(file.read(PIECE if size > READ_WHOLE else -1))
            return content.hexdigest()[:12]
    except OSError as error:
        return error.strerror or type(error).__name__


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
