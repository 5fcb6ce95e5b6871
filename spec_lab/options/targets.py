"""The targets: a row for each, and for each shape of a known model."""

from __future__ import annotations

from pathlib import Path

from spec_lab.menu.choices import Weights
from spec_lab.menu.config import RunConfig, TargetConfig
from spec_lab.menu.option import TargetOption
from spec_lab.options.shipped import SHIPPED, ZOO, missing_folder

SHAPES = Path(__file__).parents[1] / "checkpoints" / "shapes"


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


def shipped_folder(target: TargetConfig) -> Path:
    """Find the shipped target of this name."""
    return ZOO / target.name


def weights_are_here(config: RunConfig) -> str | None:
    """A checkout, or a package, may be without the weights of a shipped target."""
    folder = shipped_folder(config.target)
    return (
        None
        if folder.is_dir()
        else f"target={config.target.name}: its weights are not here ({folder}); choose another target"
    )


def checkpoint_folder(target: TargetConfig) -> Path:
    """Return `target.path`, which was not refused."""
    assert target.path is not None
    return Path(target.path)


def weights_or_random(config: RunConfig) -> str | None:
    """A shape brings no weights."""
    target = config.target
    if target.path is not None:
        return missing_folder("target.path", target.path)
    if target.weights == Weights.random:
        return None
    return f"target={target.name} is a shape without weights; add target.weights=random, or target.path=FOLDER"


def shape_folder(target: TargetConfig) -> Path:
    """Return `target.path`, or the folder with the shape's config.json."""
    return SHAPES / target.name if target.path is None else Path(target.path)


ROWS = (
    # One thread: its operators are too short to share, and a second thread that has to wait for a busy core costs more
    # than it brings.
    *(
        TargetOption(name=name, folder=shipped_folder, num_threads=1, refusals=(reads_no_path, weights_are_here))
        for name in SHIPPED
    ),
    TargetOption(name="hf", folder=checkpoint_folder, refusals=(needs_a_path,)),
    *(
        TargetOption(name=name, folder=shape_folder, refusals=(weights_or_random,))
        for name in (
            "llama3_8b",
            "llama3_70b",
            "qwen3_4b",
            "qwen3_8b",
            "qwen3_30b_a3b",
            "glm4_7_flash",
            "deepseek_v3",
            "gemma4_31b",
            "gemma4_e4b",
            "qwen3_5_9b",
            "qwen3_5_35b_a3b",
        )
    ),
)
