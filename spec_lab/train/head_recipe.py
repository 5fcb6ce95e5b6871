"""The interfaces that a kind of drafter implements to be trained for a target such as hf."""

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
    """The functions that train and measure one kind of drafter on packed rows.

    Attributes:
        train: trains a drafter in place, given its option and a task.
        trained_laws: takes `(drafter, target, rows, pending, taps, K)`, where `pending` are columns of one packed row.
            Returns the training forward's logits of the K drafts after each column: [pending, K, scored tokens].
        served_laws: takes `(serving, engine, text, prompt length)`. Returns the engine's logits of the K drafts after
            the prompt: [K, scored tokens].
        forced: takes `(drafter, target, rows, taps, K, batch size)`, and returns the counts of teacher forcing.
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
        """The functions that train and measure it on packed rows."""

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> Any:
        """Make the drafter that training starts from."""

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the layers' hidden states that it reads; the last state is no tap."""

    def save(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it in the form that the engine loads."""

    def load(self, folder: Path, target: FrozenTarget) -> Any:
        """Read what `save` wrote, in float32, on the target's device."""

    def describe(self, folder: Path) -> DrafterDescription:
        """Return its description for the card."""
