"""The folders of drafters' weights: typed, or shipped for the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.packaged import ZOO
from spec_lab.config.choices import Weights
from spec_lab.config.option import knob
from spec_lab.config.run import Run, TrainedDrafterConfig
from spec_lab.core.errors import UserError
from spec_lab.core.file_stamps import file_stamps


@dataclass
class WeightsConfig(TrainedDrafterConfig):
    """The base of the drafters whose weights may be shipped, or random."""

    weights: Weights = knob(Weights.checkpoint, "where the weights come from; random is for speed studies")

    def check(self, run: Run) -> Iterator[str]:
        if self.weights == Weights.checkpoint and self.path is None and not self.is_shipped(run):
            yield (
                f"no weights of drafter={self.name} are shipped for target={run.target.name}; give some with "
                "drafter.path=FOLDER, or choose drafter=ngram"
            )

    def key(self, run: Run) -> tuple[Any, ...]:
        """Return what a head that was made of these weights depends on beside its target and backend."""
        of_all = {field.name for field in fields(TrainedDrafterConfig)} - {"name", "path"}
        own = (getattr(self, field.name) for field in fields(self) if field.name not in of_all)
        return *own, run.seed if self.weights == Weights.random else file_stamps([self.folder(run)])

    def is_shipped(self, run: Run) -> bool:
        """Return whether weights are found without a path."""
        return self.shipped(run).is_dir()

    def shipped(self, run: Run) -> Path:
        """Return the folder of the weights shipped for the target, whether it is there or not."""
        return ZOO / f"{run.target.name}-{self.name}"

    def folder(self, run: Run) -> Path:
        """Return the folder of the weights; UserError if it is missing."""
        folder = self.shipped(run) if self.path is None else Path(self.path)
        if not folder.exists():
            raise UserError(f"drafter.path={folder} is missing; give the weights of drafter={self.name}")
        return folder
