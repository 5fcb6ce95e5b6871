"""The targets: shipped, in an installed package, a checkpoint, or the shape of a known model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spec_lab.checkpoints.packaged import PACKAGED, SHAPES, ZOO
from spec_lab.config.choices import Weights
from spec_lab.config.groups import TargetConfig
from spec_lab.config.option import option
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError


def _path_is_read(target: TargetConfig) -> Iterator[str]:
    if target.path is not None:
        yield f"target.path={target.path} is not read by target={target.name}, which has weights; use target=hf"


@option("target", "shipped")
class ShippedTarget(TargetConfig):
    """A target whose weights are part of this package."""

    # Its operators are too short to share: a second thread that waits for a busy core costs more than it saves.
    num_threads = 1

    def check(self, run: Run) -> Iterator[str]:
        yield from _path_is_read(self)

    @property
    def folder(self) -> Path:
        return ZOO / self.name


@option("target", "packaged")
class PackagedTarget(TargetConfig):
    """A target whose weights lie in another Python package."""

    def check(self, run: Run) -> Iterator[str]:
        yield from _path_is_read(self)
        if PACKAGED[self.name].find() is None:
            yield f"target={self.name}: the package of its weights is not installed; {PACKAGED[self.name].command}"

    @property
    def folder(self) -> Path:
        file = PACKAGED[self.name].find()
        assert file is not None, "checked before"
        return file


@option("target", "hf")
class CheckpointTarget(TargetConfig):
    """A Hugging Face checkpoint from a folder, or a GGUF file."""

    def check(self, run: Run) -> Iterator[str]:
        if self.path is None:
            yield f"target={self.name} needs a checkpoint; add target.path=FOLDER, or target.path=FILE.gguf"
        elif not Path(self.path).exists():
            yield f"target.path={self.path} does not exist; give the folder of a checkpoint, or a GGUF file"

    @property
    def folder(self) -> Path:
        if self.path is None:
            raise UserError(f"target={self.name} needs a checkpoint; add target.path=FOLDER")
        return Path(self.path)


@option("target", "shape")
class ShapeTarget(CheckpointTarget):
    """The shape of a known model, with random weights for speed studies or with a checkpoint."""

    def check(self, run: Run) -> Iterator[str]:
        if self.path is not None:
            yield from super().check(run)
        elif self.weights != Weights.random:
            yield f"target={self.name} has a shape but no weights; add target.weights=random, or target.path=FOLDER"

    @property
    def folder(self) -> Path:
        return SHAPES / self.name if self.path is None else Path(self.path)
