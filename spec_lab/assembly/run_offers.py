"""This module says of a run how many drafts its requests may offer: its K by batch, its stop and its budget of rows. It
imports no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_lab.assembly.drafters.trained import DraftStop
from spec_lab.config import RunConfig
from spec_lab.engine.k_schedule import KSchedule, problem_of

MAX_DRAFT_TOKENS = 16


def k_schedule(config: RunConfig) -> KSchedule | None:
    """Return the K of each batch size; None where there is one K for all."""
    ranges = config.drafter.k_schedule
    return None if ranges is None else KSchedule.of(ranges)


def smallest_k(config: RunConfig) -> int:
    """Return the fewest drafts that a round of any batch has room for; K where there is no schedule that can be
    read."""
    ranges = config.drafter.k_schedule
    if ranges is None or problem_of(ranges, MAX_DRAFT_TOKENS) is not None:
        return config.drafter.num_draft_tokens
    return KSchedule.of(ranges).choices[-1]


def stop_threshold(config: RunConfig) -> float | None:
    """Return the confidence under which a request's drafting ends; None where it does not."""
    drafter: Any = config.drafter
    return drafter.stop_threshold if getattr(drafter, "stop", DraftStop.none) == DraftStop.confidence else None


def reads_confidences(config: RunConfig) -> bool:
    """Tell whether anything asks how sure the drafter is of its drafts."""
    return stop_threshold(config) is not None or config.verify.budget is not None


def may_offer_fewer(config: RunConfig) -> bool:
    """Tell whether a request may offer fewer than K drafts."""
    return reads_confidences(config) or config.drafter.k_schedule is not None


def named_offers(config: RunConfig) -> str:
    """Return the knob by which a request may offer fewer than K drafts, as it was typed."""
    if config.drafter.k_schedule is not None:
        ranges = ",".join(f"[{','.join(map(str, entry))}]" for entry in config.drafter.k_schedule)
        return f"drafter.k_schedule=[{ranges}]"
    if config.verify.budget is not None:
        return f"verify.budget={config.verify.budget}"
    return "drafter.stop=confidence"


def without_offers() -> str:
    """Return the overrides with which all drafts are offered."""
    return "drafter.stop=none drafter.k_schedule=null verify.budget=null"


def with_largest_k(config: RunConfig) -> RunConfig:
    """Return the same run with the largest K of its schedule as K, unless somebody set K: what then differs is
    refused."""
    drafter = config.drafter
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "num_draft_tokens")
    if drafter.k_schedule is None or drafter.num_draft_tokens != usual or usual == 0:
        return config
    if problem_of(drafter.k_schedule, MAX_DRAFT_TOKENS) is not None:
        return config
    largest = KSchedule.of(drafter.k_schedule).choices[0]
    return dataclasses.replace(config, drafter=dataclasses.replace(drafter, num_draft_tokens=largest))
