"""What a training for a target that is taken as it lies asks of a drafter: a recipe, and its form on packed rows."""

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
    """How drafters of a kind stand on packed rows.

    Attributes:
        train: trains a drafter in place, by its option, on a task.
        trained_laws: `(drafter, target, rows, pending, taps, K)` to [pending, K, scored]: what the training forward
            says behind columns of one packed row, which hold pending tokens.
        served_laws: `(serving, engine, text, prompt length)` to [K, scored], what the runtime says there.
        forced: `(drafter, target, rows, taps, K, batch size)` to what teacher forcing counts.
    """

    train: Callable[[Any, Any, PackedTask], list[CurvePoint]]
    trained_laws: Callable[[Any, FrozenTarget, PackedRows, Tensor, Sequence[Tap], int], Tensor]
    served_laws: Callable[[Serving, Engine, Tensor, int], Tensor]
    forced: Callable[[Any, FrozenTarget, PackedRows, Sequence[Tap], int, int], TeacherForced]


class HeadRecipe(Protocol):
    """Makes, saves and loads one kind of drafter for a frozen target."""

    @property
    def config(self) -> PackedTrainingConfig:
        """The option that was chosen, its sizes filled in."""

    @property
    def form(self) -> PackedForm:
        """How it stands on packed rows."""

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> Any:
        """Make an untrained one."""

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the hidden states that it reads besides the last."""

    def save(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it as the runtime loads it."""

    def load(self, folder: Path, target: FrozenTarget) -> Any:
        """Read what `save` wrote, in float32, on the target's device."""

    def describe(self, folder: Path) -> DrafterDescription:
        """Return what the card says of it."""
