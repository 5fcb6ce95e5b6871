"""Checks folders of options, the user's (`--config-dir`) and those of extensions, before Hydra reads them.

If two files have the same name, Hydra reads the first, which is the lab's, and silently ignores the other. With YAML's
aliases, a file of a few lines can expand to more than fits in memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from spec_lab.core.errors import UserError
from spec_lab.core.regular import regular_bytes
from spec_lab.program.flags import split_flags
from spec_lab.program.options import Menu, conf_folder
from spec_lab.program.overrides import refuse_many_jobs
from spec_lab.program.yaml_file import read_yaml

FOLDER_FLAGS = ("--config-dir", "-cd")
PACKAGE = re.compile(r"(?:\s*#.*\n)*?\s*#\s*@package\s+(?P<name>\S+)")
WORD = re.compile(r"[\w-]+")
LIKE_DEFAULTS = 0.85
MOST_NODES = 100_000
"""The largest number of keys and values in a file of options, which usually has some tens."""


def typed_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folder that `--config-dir` names, if any.

    Raises:
        UserError: the folder does not exist, or two are named (Hydra would read only the last one).
    """
    typed = [value for flag, value in pairwise(arguments) if flag in FOLDER_FLAGS]
    if len(typed) > 1:
        others = ",".join(typed[1:])
        raise UserError(f"--config-dir is given twice; keep the first, and write hydra.searchpath=[{others}] instead")
    for folder in typed:
        if not folder or not Path(folder).is_dir():
            raise UserError(
                f"--config-dir {folder!r}: there is no such folder; name one with options, laid out as conf/"
            )
    return [Path(folder) for folder in typed]


def refuse_misplaced(arguments: Sequence[str], menu: Menu) -> None:
    """Refuse a typed option whose file lies at a place that is not read.

    Such a file is sought below the folder of `--config-dir`, or below `./conf` if there is no such flag.

    Raises:
        UserError: naming the file, and where it would be read.
    """
    flags, overrides = split_flags(arguments)
    folders = typed_folders(flags)
    searched = [folder for folder in folders or [Path("conf")] if folder.resolve() != conf_folder().resolve()]
    if any(text.startswith("hydra.searchpath=") for text in overrides):
        return
    for text in overrides:
        name, _, typed = text.partition("=")
        known = menu.groups[name].options if name in menu.groups else ()
        for option in typed.split(",") if name in menu.groups else ():
            place = f"{name}/{option}.yaml"
            if not WORD.fullmatch(option) or option in known or any((folder / place).is_file() for folder in folders):
                continue
            others = menu.groups.keys() - {name}
            found = [file for file in _files_of(option, searched) if file.parent.name not in others]
            if found:
                raise UserError(f"{name}={option}: {found[0]} is not read; --config-dir DIR reads DIR/{place}")


def _files_of(option: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the files with the name of an option, at most two folders below one of `folders`."""
    for folder in folders:
        for above in ("", "*/", "*/*/"):
            yield from (file for suffix in ("yaml", "yml") for file in folder.glob(f"{above}{option}.{suffix}"))


def check_own_options(folders: Iterable[Path], conf: Path, groups: Iterable[str]) -> None:
    """Check the files at the top of `folders` and in their folders for `groups`.

    Args:
        conf: the lab's own folder, which is read first.

    Raises:
        UserError: a file would not be read, or not as it is meant; or it has too many values, or sweeps too many jobs.
    """
    for folder in folders:
        for place in ("", *groups):
            for file in sorted((folder / place).glob("*.yaml")):
                if (conf / place / file.name).is_file() and not file.samefile(conf / place / file.name):
                    raise UserError(
                        f"{file}: the lab has a file {file.relative_to(folder)}, which is read instead; rename it"
                    )
                if file.is_file():
                    _refuse_unread_contents(file)
                    _refuse_joined_keys(file)
                    _refuse_question_marks(file)
                    _refuse_defaults(file)
                    _refuse_unread_sweep(file)


def _refuse_unread_contents(file: Path) -> None:
    contents = regular_bytes(file)
    if contents.startswith(codecs.BOM_UTF8):
        raise UserError(f"{file}: begins with a byte order mark, after which '# @package' is not read; save it without")
    package = PACKAGE.match(contents.decode(errors="replace"))
    if package is not None and package["name"] != "_global_" and package["name"].strip("_").lower() == "global":
        raise UserError(f"{file}: '# @package {package['name']}' is read as a key; write '# @package _global_'")
    if num_nodes(contents.decode(errors="replace")) > MOST_NODES:
        raise UserError(f"{file}: has more than {MOST_NODES} values, counting what its aliases stand for; use fewer")


def _refuse_joined_keys(file: Path) -> None:
    """Raise UserError for `drafter.path: DIR`, which YAML reads as a key of that name. Hydra's own keys are not
    checked, since its sweeper reads keys with dots. Other mistakes in the file are left to Hydra."""
    content: Any = None
    with suppress(UserError):
        content = read_yaml(file)
    parts = [content, *(content[key] for key in content if key != "hydra")] if isinstance(content, dict) else []
    for key in (str(key) for part in parts if isinstance(part, dict) for key in part):
        above, joined, leaf = key.rpartition(".")
        if joined:
            written = f"{leaf}: VALUE" if file.parent.name == above else f"{above}: {{{leaf}: VALUE}}"
            raise UserError(f"{file}: {key} is read as one name; write `{written}`")


def _refuse_question_marks(file: Path) -> None:
    """Raise UserError for `KEY: ???`. It seems to require a value, but keeps an earlier one, such as that of the option
    that the file extends."""
    content: Any = None
    with suppress(UserError):
        content = read_yaml(file)
    parts = [content, *content.values()] if isinstance(content, dict) else []
    for part in parts:
        for key, value in part.items() if isinstance(part, dict) else ():
            if value == "???":
                raise UserError(f"{file}: `{key}: ???` does not change {key}; write a value, or leave {key} out")


def _refuse_defaults(file: Path) -> None:
    """Raise UserError for a misspelt `defaults`, and for keys of the file that options after `_self_` replace."""
    content: Any = None
    with suppress(UserError):
        content = read_yaml(file)
    keys = list(content) if isinstance(content, dict) else []
    for key in map(str, keys):
        if key != "defaults" and get_close_matches(key.lower(), ["defaults"], cutoff=LIKE_DEFAULTS):
            raise UserError(f"{file}: there is no key {key}; did you mean defaults?")
    listed = content.get("defaults") if keys else None
    behind = listed[listed.index("_self_") + 1 :] if isinstance(listed, list) and "_self_" in listed else []
    words = [" ".join(map(str, entry)) if isinstance(entry, dict) else str(entry) for entry in behind]
    if len(keys) > 1 and not all(word.startswith("override ") for word in words):
        raise UserError(f"{file}: what follows _self_ below `defaults:` replaces the keys of the file; put _self_ last")


def _refuse_unread_sweep(file: Path) -> None:
    """Raise UserError if an experiment sweeps too many jobs, or values that Hydra cannot read. Other mistakes in the
    file are left to Hydra."""
    params: Any = {}
    with suppress(UserError, TypeError, KeyError, ValueError, IndexError):
        params = dict(read_yaml(file)["hydra"]["sweeper"]["params"])
    texts = [f"{key}={value}" for key, value in params.items()]
    try:
        refuse_many_jobs([_swept_value(text) for text in texts])
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _swept_value(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, _, value = text.partition("=")
        said = f"hydra.sweeper.params: {key}: {value} cannot be read"
        raise UserError(f"{said}; separate values by single commas, as in {key}: 1,2") from error


def num_nodes(text: str) -> int:
    """Return the number of keys and values in a YAML text with its aliases expanded. Return 0 for a text that is not
    YAML, which is refused when it is read."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                sizes |= {} if anchor is None else {anchor: total - before + 1}
                total += 1
            elif isinstance(event, yaml.AliasEvent):
                total += sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                total += 1
    except (yaml.YAMLError, RecursionError):
        return 0
    return total
