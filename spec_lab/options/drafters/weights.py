"""The base of the drafters with weights: their folders, and the steps from a checkpoint to a drafter."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.packaged import ZOO
from spec_lab.config.choices import DraftSampling, Weights
from spec_lab.config.groups import DrafterConfig
from spec_lab.config.option import knob
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.file_stamps import file_stamps

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import Drafter


@dataclass
class WeightsConfig(DrafterConfig):
    """The base of the drafters with weights, which may be shipped, or random.

    `read` gives config and tensors, `model` makes of them what engines share, and `drafter` the part of one engine. The
    doctor calls `model` with a config and tensors that it reads otherwise.
    """

    notes_confidence = True

    path: str | None = knob(None, "folder of the drafter's weights; null is the one shipped for the target")
    draft_sampling: DraftSampling = knob(DraftSampling.greedy, "how drafts are picked")
    weights: Weights = knob(Weights.checkpoint, "where the weights come from; random is for speed studies")

    def key(self, run: Run) -> tuple[Any, ...]:
        """Return what a head that was made of these weights depends on beside its target and backend."""
        of_drafts = ("num_draft_tokens", "plan", "draft_sampling")
        own = (getattr(self, field.name) for field in fields(self) if field.name not in of_drafts)
        return *own, run.seed if self.weights == Weights.random else file_stamps([self.folder(run)])

    def files(self, run: Run) -> list[Path]:
        return [] if self.weights == Weights.random else [self.folder(run)]

    def shipped(self, run: Run) -> Path:
        """Return the folder of the weights shipped for the target, whether it is there or not."""
        return ZOO / f"{run.target.name}-{self.name}"

    def folder(self, run: Run) -> Path:
        """Return the folder of the weights; UserError if it is missing."""
        folder = self.shipped(run) if self.path is None else Path(self.path)
        if not folder.exists():
            where = f"shipped for target={run.target.name}" if self.path is None else f"in drafter.path={folder}"
            raise UserError(
                f"no weights of drafter={self.name} are {where}; give their folder with drafter.path=FOLDER, or choose "
                "drafter=ngram"
            )
        return folder

    def build(self, lab: Lab) -> Drafter[Any]:
        return self.drafter(lab, lab.heads.once(self.key(lab.run), lambda: self.model(lab, *self.read(lab))))

    def read(self, lab: Lab) -> tuple[Any, Any]:
        """Read config and tensors, or make random ones; UserError if they do not fit the target."""
        raise NotImplementedError

    def model(self, lab: Lab, config: Any, tensors: Any) -> Any:
        """Make the model, which several drafters may share."""
        raise NotImplementedError

    def drafter(self, lab: Lab, model: Any) -> Drafter[Any]:
        """Make the drafter of one engine."""
        raise NotImplementedError
