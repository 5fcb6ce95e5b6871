"""The targets: a registry entry (row) for each, and for each shape of a known model."""

from __future__ import annotations

from pathlib import Path

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.packaged import PACKAGED
from spec_lab.menu.choices import Weights
from spec_lab.menu.config import RunConfig, TargetConfig
from spec_lab.menu.option import TargetOption
from spec_lab.options.shipped import SHIPPED, ZOO, missing_folder

SHAPES = Path(__file__).parents[1] / "checkpoints" / "shapes"


def reads_no_path(config: RunConfig) -> str | None:
    """A target whose weights are in this package, or in another installed package, has no path."""
    target = config.target
    return (
        None if target.path is None else f"target.path={target.path} is not read by target={target.name}; add target=hf"
    )


def needs_a_path(config: RunConfig) -> str | None:
    """A checkpoint needs a path, to its folder or file."""
    path = config.target.path
    if path is None:
        return "target=hf needs a checkpoint; add target.path=FOLDER, or target.path=FILE.gguf"
    if is_gguf(Path(path)):
        return None if Path(path).is_file() else f"target.path={path} is not a file; give the GGUF file of a model"
    return missing_folder("target.path", path)


def shipped_folder(target: TargetConfig) -> Path:
    """Return the folder of the shipped target with this name."""
    return ZOO / target.name


def weights_are_here(config: RunConfig) -> str | None:
    """The weights of a shipped target are in this checkout or package."""
    folder = shipped_folder(config.target)
    return (
        None
        if folder.is_dir()
        else f"target={config.target.name}: its weights are missing ({folder}); choose another target"
    )


def package_is_here(config: RunConfig) -> str | None:
    """The package that holds the target's weights is installed."""
    name = config.target.name
    if PACKAGED[name].find() is not None:
        return None
    return f"target={name}: its weights are in a package, which is not installed; {PACKAGED[name].command}"


def packaged_file(target: TargetConfig) -> Path:
    """Return the file in an installed package."""
    file = PACKAGED[target.name].find()
    assert file is not None
    return file


def checkpoint_folder(target: TargetConfig) -> Path:
    """Return `target.path`, which must be set."""
    assert target.path is not None
    return Path(target.path)


def weights_or_random(config: RunConfig) -> str | None:
    """A shape has no weights, so they must be random or have a path."""
    target = config.target
    if target.path is not None:
        return missing_folder("target.path", target.path)
    if target.weights == Weights.random:
        return None
    return f"target={target.name} has a shape but no weights; add target.weights=random, or target.path=FOLDER"


def shape_folder(target: TargetConfig) -> Path:
    """Return `target.path`, or the folder with the shape's config.json."""
    return SHAPES / target.name if target.path is None else Path(target.path)


ROWS = (
    # One thread for the shipped targets, whose operators are too short to share: a second thread that waits for a busy
    # core costs more than it saves.
    *(
        TargetOption(name=name, folder=shipped_folder, num_threads=1, refusals=(reads_no_path, weights_are_here))
        for name in SHIPPED
    ),
    *(TargetOption(name=name, folder=packaged_file, refusals=(reads_no_path, package_is_here)) for name in PACKAGED),
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
