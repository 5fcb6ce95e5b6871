"""drafter.plan=drawn: a plan of an extension, which chooses any shape that a plan may choose."""

from __future__ import annotations

import random
from collections.abc import Sequence as List
from typing import Any

from spec_lab.config.option import option
from spec_lab.core.types import Sequence
from spec_lab.engine.plan import OFF, LaunchShape, Plan, PlannedLaunch


class DrawnPlan(Plan):
    """Chooses any shape that a plan may choose, with equal probabilities of off and on."""

    resumes = True

    def __init__(self, most: int) -> None:
        self._most = most
        self.restart()

    def restart(self) -> None:
        self._draw = random.Random(0)
        self.chosen: list[LaunchShape] = []
        self._num_reviews = 0

    def choose(self, sequences: List[Sequence]) -> PlannedLaunch:
        assert self._num_reviews == len(self.chosen), "each launch is reviewed before the next is chosen"
        is_off = self._draw.random() < 0.5
        shape = OFF if is_off else LaunchShape(self._draw.randint(0, self._most), self._draw.randint(1, self._most))
        self.chosen.append(shape)
        return PlannedLaunch(shape)

    def review(self, sequences: List[Sequence]) -> None:
        self._num_reviews += 1


@option("drafter.plan", "drawn")
class Drawn:
    def build(self, lab: Any) -> DrawnPlan:
        sizes = lab.run.sizes
        return DrawnPlan(lab.run.drafter.num_draft_tokens if sizes is None else sizes.num_rows - 1)
