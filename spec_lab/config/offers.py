"""The number of drafts that requests may offer. The keys for K, for an early stop and for the row budget determine it.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.config.choices import ByRequest, DraftStop
from spec_lab.engine.k_schedule import KSchedule, problem_of

if TYPE_CHECKING:
    from spec_lab.config.run import Run

MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunOffers:
    """The drafts that requests may offer: all K of them, or fewer.

    Attributes:
        num_draft_tokens: K.
        ranges: the ranges of `drafter.k_schedule`, which may be invalid; None means one K for all batch sizes.
        temperatures: applied to the drafter's confidence in each draft; None leaves it unchanged.
        threshold: the confidence below which a request's drafting ends; None if it does not end early.
        budget: the largest number of rows in a round; None means no limit.
        by_request: what a request's K depends on.
        finder: the name of a drafter that offers as many drafts as it finds; None for any other.
    """

    num_draft_tokens: int
    ranges: list[list[int]] | None
    threshold: float | None
    budget: int | None
    by_request: ByRequest
    finder: str | None = None
    temperatures: tuple[float, ...] | None = None

    @property
    def schedule(self) -> KSchedule | None:
        """Return the K of each batch size, from valid ranges; None if there is one K for all."""
        return None if self.ranges is None else KSchedule.of(self.ranges)

    @property
    def read_confidences(self) -> bool:
        """Return whether anything uses the drafter's confidence in its drafts."""
        return self.threshold is not None or self.budget is not None

    @property
    def may_be_fewer(self) -> bool:
        """Return whether a request may offer fewer than K drafts."""
        return bool(self.named)

    @property
    def named(self) -> str:
        """Return the knobs by which a request may offer fewer than K drafts."""
        knobs = {
            "drafter.k_schedule": self.ranges is not None,
            f"verify.budget={self.budget}": self.budget is not None,
            "drafter.stop=confidence": self.threshold is not None,
            f"drafter.by_request={self.by_request}": self.by_request != ByRequest.same,
            f"drafter={self.finder}": self.finder is not None,
        }
        return " ".join(knob for knob, is_set in knobs.items() if is_set)


def run_offers(run: Run) -> RunOffers:
    """Return what a run's requests may offer. A drafter on the host offers as many drafts as it finds."""
    drafter: Any = run.drafter
    stops = getattr(drafter, "stop", DraftStop.none) == DraftStop.confidence
    threshold = drafter.stop_threshold if stops else None
    finder = drafter.name if drafter.drafts_on_host else None
    given = getattr(drafter, "confidence_temperatures", None)
    return RunOffers(
        drafter.num_draft_tokens,
        drafter.k_schedule,
        threshold,
        run.verify.budget,
        drafter.by_request,
        finder,
        None if given is None else tuple(given),
    )


def with_k(run: Run) -> Run:
    """Return the run with K from its tree's depth or its schedule's largest K, if K has its default.

    A typed K that differs is refused by the checks.
    """
    drafter, sizes, ranges = run.drafter, run.sizes, run.drafter.k_schedule
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "num_draft_tokens")
    if not drafter.drafts or drafter.num_draft_tokens != usual:
        return run
    if sizes is not None:
        num_draft_tokens = sizes.depth
    elif ranges is not None and problem_of(ranges, MAX_DRAFT_TOKENS) is None:
        num_draft_tokens = KSchedule.of(ranges).choices[0]
    else:
        return run
    return run.with_parts(drafter=dataclasses.replace(drafter, num_draft_tokens=num_draft_tokens))
