"""The targets: a row for each."""

from __future__ import annotations

from pathlib import Path

from spec_lab.assembly.drafters.trained import ZOO, missing_folder
from spec_lab.assembly.option import TargetOption
from spec_lab.config import RunConfig, TargetConfig


def reads_no_path(config: RunConfig) -> str | None:
    """A shipped target lies where it lies."""
    target = config.target
    return (
        None if target.path is None else f"target.path={target.path} is not read by target={target.name}; add target=hf"
    )


def needs_a_path(config: RunConfig) -> str | None:
    """A checkpoint is named by its folder."""
    path = config.target.path
    if path is None:
        return "target=hf needs a checkpoint; add target.path=FOLDER"
    return missing_folder("target.path", path)


def pocket_folder(target: TargetConfig) -> Path:
    """The shipped target."""
    return ZOO / "pocket"


def checkpoint_folder(target: TargetConfig) -> Path:
    """`target.path`, which was not refused."""
    assert target.path is not None
    return Path(target.path)


OPTIONS = (
    # One thread: its operators are too short to share, and a second thread that has to wait for a busy core costs more
    # than it brings.
    TargetOption(name="pocket", folder=pocket_folder, num_threads=1, refusals=(reads_no_path,)),
    TargetOption(name="hf", folder=checkpoint_folder, refusals=(needs_a_path,)),
)
