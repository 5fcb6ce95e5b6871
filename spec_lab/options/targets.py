"""The targets: shipped, in an installed package, a checkpoint, or the shape of a known model."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from spec_lab.checkpoints.packaged import PACKAGED, SHAPES, ZOO
from spec_lab.config.choices import Weights
from spec_lab.config.groups import TargetConfig
from spec_lab.config.option import knob, option
from spec_lab.core.errors import UserError


@option("target", "shipped")
class ShippedTarget(TargetConfig):
    """A target whose weights are part of this package."""

    # Its operators are too short to share: a second thread that waits for a busy core costs more than it saves.
    num_threads: ClassVar[int | None] = 1

    @property
    def folder(self) -> Path:
        return ZOO / self.name


@option("target", "packaged")
class PackagedTarget(TargetConfig):
    """A target whose weights lie in another Python package."""

    @property
    def folder(self) -> Path:
        file = PACKAGED[self.name].find()
        if file is None:
            raise UserError(
                f"target={self.name}: the package of its weights is not installed; {PACKAGED[self.name].command}"
            )
        return file


@option("target", "hf")
class CheckpointTarget(TargetConfig):
    """A Hugging Face checkpoint from a folder, or a GGUF file."""

    path: str | None = knob(None, "folder of a Hugging Face checkpoint (families: docs/families.md), or a GGUF file")

    @property
    def folder(self) -> Path:
        if self.path is None:
            raise UserError(
                f"target={self.name} has no weights of its own; add target.path=FOLDER, or to a shape "
                "target.weights=random"
            )
        return Path(self.path)


@option("target", "shape")
class ShapeTarget(CheckpointTarget):
    """The shape of a known model, with random weights for speed studies or with a checkpoint."""

    @property
    def folder(self) -> Path:
        has_own = self.path is None and self.weights == Weights.random
        return SHAPES / self.name if has_own else super().folder
