"""The parts of a drafter for its training for an existing target: a recipe, and a form on packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.engine.engine import Engine
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.drafter_config import PackedTrainingConfig
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.loop import CurvePoint
from spec_lab.train.packed_rows import PackedRows, TrainingTexts
from spec_lab.train.packed_training import PackedTask
from spec_lab.train.serving import Serving
from spec_lab.train.teacher_forced import TeacherForced


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Functions for drafters of a kind on packed rows.

    Attributes:
        train: trains a drafter in place, given its option and a task.
        trained_laws: from `(drafter, target, rows, pending, taps, K)` to the training forward's logits [pending, K,
            scored] after the columns `pending` of one packed row.
        served_laws: from `(serving, engine, text, prompt length)` to the engine's logits [K, scored] after a prompt.
        forced: from `(drafter, target, rows, taps, K, batch size)` to the counts of teacher forcing.
    """

    train: Callable[[Any, Any, PackedTask], list[CurvePoint]]
    trained_laws: Callable[[Any, FrozenTarget, PackedRows, Tensor, Sequence[Tap], int], Tensor]
    served_laws: Callable[[Serving, Engine, Tensor, int], Tensor]
    forced: Callable[[Any, FrozenTarget, PackedRows, Sequence[Tap], int, int], TeacherForced]


class HeadRecipe(Protocol):
    """Makes, saves and loads one kind of drafter for a frozen target."""

    @property
    def config(self) -> PackedTrainingConfig:
        """The chosen option, with its sizes filled in."""

    @property
    def form(self) -> PackedForm:
        """Its form on packed rows."""

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> Any:
        """Make an untrained drafter."""

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the layers' hidden states that it reads; the last state is no tap."""

    def save(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it in the form that the engine loads."""

    def load(self, folder: Path, target: FrozenTarget) -> Any:
        """Read what `save` wrote, in float32, on the target's device."""

    def describe(self, folder: Path) -> DrafterDescription:
        """Return its description for the card."""
