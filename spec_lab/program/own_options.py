"""Checks the user's and extensions' folders of options (`--config-dir`) before Hydra reads them.

If two files have the same name, Hydra reads the first, which is the lab's, and silently ignores the other. With YAML's
aliases, a file of a few lines can expand to more than fits in memory.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from spec_lab.core.errors import UserError
from spec_lab.core.regular import regular_bytes
from spec_lab.program.overrides import refuse_many_jobs
from spec_lab.program.yaml_file import read_yaml

FOLDER_FLAGS = ("--config-dir", "-cd")
MOST_NODES = 100_000
"""The largest number of values in a file of options, which usually has about ten."""


def typed_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folder that `--config-dir` names, if any.

    Raises:
        UserError: the folder does not exist, or two are named (Hydra would read only the last one).
    """
    typed = [value for flag, value in pairwise(arguments) if flag in FOLDER_FLAGS]
    if len(typed) > 1:
        raise UserError(f"--config-dir is given twice; use one, and hydra.searchpath=[{','.join(typed[1:])}]")
    for folder in typed:
        if not folder or not Path(folder).is_dir():
            raise UserError(
                f"--config-dir {folder!r}: there is no such folder; name one with options, laid out as conf/"
            )
    return [Path(folder) for folder in typed]


def check_own_options(folders: Iterable[Path], conf: Path, groups: Iterable[str]) -> None:
    """Check the files at the top of `folders` and in their folders for `groups`.

    Args:
        conf: the lab's own folder, which is read first.

    Raises:
        UserError: a file would not be read, has too many values, or sweeps too many jobs.
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
                    _refuse_many_jobs_of(file)


def _refuse_unread_contents(file: Path) -> None:
    contents = regular_bytes(file)
    if contents.startswith(codecs.BOM_UTF8):
        raise UserError(f"{file}: begins with a byte order mark, after which '# @package' is not read; save it without")
    if num_nodes(contents.decode(errors="replace")) > MOST_NODES:
        raise UserError(f"{file}: its aliases stand for more than {MOST_NODES} values; write them out")


def _refuse_many_jobs_of(file: Path) -> None:
    """Raise UserError if an experiment sweeps too many jobs. Other mistakes in the file are left to Hydra."""
    params: Any = {}
    with suppress(UserError, TypeError, KeyError, ValueError, IndexError):
        params = dict(read_yaml(file)["hydra"]["sweeper"]["params"])
    texts = [f"{key}={value}" for key, value in params.items()]
    try:
        refuse_many_jobs(OverridesParser.create().parse_overrides(texts))
    except HydraException:
        return
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def num_nodes(text: str) -> int:
    """Return the number of values in a YAML file with its aliases expanded; 0 for a text that is not YAML, which its
    reader refuses."""
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
