"""Names and makes folders: by the options of the run and a short hash of the resolved configuration, without a date.

A repeated run gets the same name with a number appended, so nothing is ever overwritten. A repeated sweep continues in
an earlier folder (`study_place`), where jobs that finished or were refused are not repeated.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from spec_lab.core.errors import (
    WORN_OUT,
    Breakdown,
    UserError,
    is_full_disk,
    one_line,
    without_folders,
)
from spec_lab.core.regular import regular_text
from spec_lab.menu.choices import Rollback
from spec_lab.menu.config import RunConfig
from spec_lab.program.ground import GROUND_FILE, Ground, changes, read_ground
from spec_lab.record.recorder import Status
from spec_lab.record.recorder import SUMMARY_FILE, replace_text, write_json

SWEEP_FILE = "sweep.json"
NAMED_GROUPS = ("target", "drafter", "acceptance", "prune", "graph")
NAMED_UNLESS = {"tree": "none"}
MAX_PARTS_LENGTH = 120
MULTIRUN_FILE = "multirun.yaml"
"""The file into which Hydra writes the composed sweep before the first job."""
OF_NO_JOB = (MULTIRUN_FILE, GROUND_FILE)
"""Files of a multirun's folder that exist before any job."""
NOT_PART_OF_THE_RUN = ("output_dir", "dry_run", "fresh", "leave_out", "logger", "auto")


def folder_name(config: RunConfig, choices: Mapping[str, str]) -> str:
    """Return `run-pocket-eagle3-strict-catchup-eager-1a2b3c4d`; `choices` are the names of the groups' choices
    (`program.labels`).

    The choices are cut if they are long, since the hash still tells configurations apart.
    """
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in NOT_PART_OF_THE_RUN}
    named = [*NAMED_GROUPS, *(group for group, usual in NAMED_UNLESS.items() if choices.get(group, usual) != usual)]
    parts = "-".join([*(choices[group] for group in named), *_knobs_without_a_group(config)])
    parts = parts[:MAX_PARTS_LENGTH].rstrip("-+._,")
    return "-".join([config.name, parts, short_hash(values)])


def _knobs_without_a_group(config: RunConfig) -> list[str]:
    """Return the verify budget and the rollback, each only if it is not the default."""
    budget, rollback = config.verify.budget, config.recurrent.rollback
    return [
        *([] if budget is None else [f"budget{budget}"]),
        *([] if rollback == Rollback.checkpoints else [str(rollback)]),
    ]


def make_folder(base: Path, name: str, write: Callable[[Path], object]) -> Path:
    """Make `base/name`, or `base/name-2` and so on, safely even if other processes do the same.

    Args:
        write: writes the first files into the folder before it is renamed to its name, so that it is never seen without
            them.

    Raises:
        UserError: `base` cannot be written.
        OSError: the cause does not depend on the command, such as a full disk (`WORN_OUT`).
    """
    unnamed = base / f".{short_hash(name)}-{os.getpid()}"
    make_output_dir(base)
    try:
        _make_writable(unnamed, base)
        write(unnamed)
        return next(folder for folder in (base / each for each in _numbered(name)) if _rename(unnamed, folder))
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)


def missing_folders(folder: Path) -> list[Path]:
    """List those of `folder` and its parents that do not exist yet, deepest first."""
    return list(itertools.takewhile(lambda place: not os.path.lexists(place), (folder, *folder.parents)))


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders in their order, up to the first that cannot be removed, such as one that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def full_disk(output_dir: object, error: BaseException, knob: str = "output_dir") -> str | None:
    """Return a line that says in which folder the disk is full; None for other errors."""
    if not is_full_disk(error):
        return None
    reason, place = one_line(error), None
    if isinstance(error, OSError):
        reason, place = error.strerror or reason, error.filename
    return f"{knob}={output_dir}: {reason}{f' ({place})' if place else ''}; free some space there"


@contextmanager
def room_under(output_dir: Path, knob: str = "output_dir") -> Iterator[None]:
    """Wrap the writing of a folder, and name the folder in the error if its disk is full.

    Raises:
        Breakdown: the disk is full.
    """
    try:
        yield
    except Exception as error:
        reason = full_disk(output_dir, error, knob)
        if reason is None:
            raise
        raise Breakdown(reason) from error


def make_output_dir(folder: Path) -> None:
    """Make `folder` with its parents.

    Raises:
        UserError: it cannot be made, or is not a folder.
        OSError: the cause does not depend on the command, such as a full disk (`WORN_OUT`).
    """
    _make_writable(folder, folder, exist_ok=True)


def _make_writable(folder: Path, base: Path, exist_ok: bool = False) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if error.errno in WORN_OUT:
            raise
        reason = _obstacle(base, error)
        raise UserError(f"output_dir={display(base)} cannot be written ({reason}); choose another one") from error


def _obstacle(folder: Path, error: OSError) -> str:
    """Return why `folder` cannot be made: the first part of its path that is not a folder, or the system's reason."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.ELOOP):
        for place in (*reversed(folder.parents), folder):
            if os.path.lexists(place) and not place.is_dir():
                return f"{display(place)} is a {'file' if place.exists() else 'link that leads nowhere'}"
    return error.strerror or type(error).__name__


def _rename(unnamed: Path, folder: Path) -> bool:
    """Rename `unnamed` to `folder`; return false if something with that name exists."""
    if os.path.lexists(folder):
        return False
    try:
        unnamed.rename(folder)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


class Study(NamedTuple):
    """A sweep or another set of runs that share a folder: its name, and its runs as plain values."""

    name: str
    content: Any


def multirun_study(name: str, overrides: Sequence[str], sweeper: Mapping[str, Any]) -> Study:
    """Return the study of a multirun.

    Args:
        overrides: the overrides on the command line, in any order.
        sweeper: the config of Hydra's sweeper, whose parameters an experiment may set.
    """
    typed = sorted(text for text in overrides if text.lstrip("+").partition("=")[0] != "fresh")
    return Study(name, [typed, _plain(sweeper.get("params"))])


def study_place(output_dir: Path, study: Study, ground: Ground, fresh: bool) -> Path:
    """Return the folder of a study, `outputs/NAME-sweep-1a2b3c4d`.

    This is the newest folder with that name whose study has the same `ground`, so that the same command continues that
    study. If there is none, it is a new folder. If earlier folders have another ground, stderr gets the reason.

    Args:
        fresh: whether to begin a new folder if that study has ended.
    """
    places = (output_dir / numbered for numbered in _numbered(f"{study.name}-sweep-{short_hash(study.content)}"))
    earlier: list[Path] = []
    for place in places:
        if not os.path.lexists(place):
            free = place
            break
        if place.is_dir():  # not a file or a broken link of that name
            earlier.append(place)
    reasons = [_reason_to_start_over(place, ground) for place in earlier]
    alike = [place for place, reason in zip(earlier, reasons, strict=True) if reason is None]
    if alike and not (fresh and (alike[-1] / SWEEP_FILE).exists()):
        return alike[-1]
    if earlier and not alike:
        print(f"the study starts over in {display(free.absolute())}: {reasons[-1]}", file=sys.stderr)
    return free


def _reason_to_start_over(place: Path, ground: Ground) -> str | None:
    """Return why the study in the folder `place` has another ground; None if it has the same ground, or no records."""
    before = read_ground(place)
    if before is not None:
        changed = changes(before, ground)
        return None if changed is None else f"since {place.name} there are changes in {changed}"
    if any(place.glob(f"*/{SUMMARY_FILE}")):
        return f"{place.name} does not record its ground ({GROUND_FILE} is missing or broken)"
    return None


def forget_places(folder: Path) -> None:
    """Shorten the absolute paths that Hydra has written into `multirun.yaml` to their last parts."""
    file = folder / MULTIRUN_FILE
    with suppress(FileNotFoundError):
        text = regular_text(file)
        if (cut := without_folders(text)) != text:
            replace_text(file, cut)


def close_sweep(folder: Path, statuses: Iterable[Status]) -> None:
    """Record that all jobs of a sweep have ended, and how many in each way."""
    counts: Counter[str] = Counter(statuses)
    write_json(folder / SWEEP_FILE, {"jobs": counts.total(), **counts})


def reopen_sweep(folder: Path) -> None:
    """Remove the record of a sweep's end, since its command runs again, and with it the jobs that failed."""
    (folder / SWEEP_FILE).unlink(missing_ok=True)


def find_ended(base: Path, name: str) -> tuple[Path, Status] | None:
    """Return the folder and status of an earlier job of this name that finished or was refused, and so need not run
    again; None if there is none."""
    for candidate in itertools.takewhile(Path.exists, (base / numbered for numbered in _numbered(name))):
        with suppress(ValueError, OSError):  # a record that cannot be read counts as not ended
            status = json.loads((candidate / SUMMARY_FILE).read_text())["status"]
            if status in ("finished", "refused"):
                return candidate, status
    return None


def discard_empty_sweep(folder: Path) -> None:
    """Remove the folder of a multirun in which no job recorded anything; Hydra makes it before it checks the jobs."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= set(OF_NO_JOB):
        for name in OF_NO_JOB:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def display(folder: Path) -> str:
    """Return the path, relative to the working directory if it is below it."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def short_hash(values: Any) -> str:
    """Return eight hexadecimal digits for a plain value."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _numbered(name: str) -> itertools.chain[str]:
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))


def _plain(params: Mapping[str, Any] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (params or {}).items()}
