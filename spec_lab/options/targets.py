"""The targets: shipped, in an installed package, a checkpoint, or the shape of a known model."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from spec_lab.checkpoints.packaged import PACKAGED, SHAPES, ZOO
from spec_lab.config.choices import Weights
from spec_lab.config.groups import TargetConfig
from spec_lab.config.option import option
from spec_lab.core.errors import UserError


@option("target", "shipped")
class ShippedTarget(TargetConfig):
    """A target whose weights are part of this package."""

    # Its operators are too short to share: a second thread that waits for a busy core costs more than it saves.
    num_threads: ClassVar[int | None] = 1

    @property
    def folder(self) -> Path:
        self.read_no_path()
        return ZOO / self.name

    def read_no_path(self) -> None:
        """Refuse a typed path."""
        if self.path is not None:
            raise UserError(f"target.path={self.path} is not read by target={self.name}; use target=hf")


@option("target", "packaged")
class PackagedTarget(ShippedTarget):
    """A target whose weights lie in another Python package."""

    num_threads = None

    @property
    def folder(self) -> Path:
        self.read_no_path()
        file = PACKAGED[self.name].find()
        if file is None:
            raise UserError(
                f"target={self.name}: the package of its weights is not installed; {PACKAGED[self.name].command}"
            )
        return file


@option("target", "hf")
class CheckpointTarget(TargetConfig):
    """A Hugging Face checkpoint from a folder, or a GGUF file."""

    @property
    def folder(self) -> Path:
        if self.path is None or not Path(self.path).exists():
            raise UserError(
                f"target={self.name} needs a checkpoint, not target.path={self.path}; use a folder, or a GGUF file"
            )
        return Path(self.path)


@option("target", "shape")
class ShapeTarget(CheckpointTarget):
    """The shape of a known model, with random weights for speed studies or with a checkpoint."""

    @property
    def folder(self) -> Path:
        if self.path is None and self.weights != Weights.random:
            raise UserError(
                f"target={self.name} has a shape but no weights; add target.weights=random, or target.path=FOLDER"
            )
        return SHAPES / self.name if self.path is None else Path(self.path)
