"""Checks runs in which requests may offer fewer than K drafts. Each function is a check, as in `menu.refusals.run`.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

from spec_lab.engine.k_schedule import problem_of
from spec_lab.menu.choices import ByRequest
from spec_lab.menu.chosen import Chosen, drafts_are_drawn
from spec_lab.menu.offers import MAX_DRAFT_TOKENS
from spec_lab.menu.refusals.drafters import lossless_rule

Check = Callable[[Chosen], str | None]


def schedule_can_be_read(chosen: Chosen) -> str | None:
    """The ranges of `drafter.k_schedule` ascend, and its largest K is K."""
    config = chosen.config
    ranges = config.drafter.k_schedule
    if ranges is None:
        return None
    if (problem := problem_of(ranges, MAX_DRAFT_TOKENS)) is not None:
        return f"drafter.k_schedule: {problem}; use drafter.k_schedule=[[1,4,5],[5,16,3],[17,64,0]]"
    schedule = chosen.offers.schedule
    assert schedule is not None
    largest, num_draft_tokens = schedule.choices[0], config.drafter.num_draft_tokens
    if largest == num_draft_tokens or not chosen.drafter.drafts:
        return None
    return (
        f"drafter.num_draft_tokens={num_draft_tokens} is not the largest K of drafter.k_schedule, {largest}, which "
        "sets it; leave out drafter.num_draft_tokens"
    )


def threshold_is_read(chosen: Chosen) -> str | None:
    """`drafter.stop_threshold` is only set together with a stop, since nothing else reads it."""
    drafter: Any = chosen.config.drafter
    if not hasattr(drafter, "stop") or chosen.offers.threshold is not None:
        return None
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "stop_threshold")
    if drafter.stop_threshold == usual:
        return None
    return (
        f"drafter.stop_threshold={drafter.stop_threshold} is not read by drafter.stop={drafter.stop}; leave it out or "
        "use drafter.stop=confidence"
    )


def temperatures_are_read(chosen: Chosen) -> str | None:
    """There is a temperature for each draft of a chain, and something reads the confidences."""
    given, num_drafts = chosen.offers.temperatures, chosen.offers.num_draft_tokens
    if given is None:
        return None
    shown = f"drafter.confidence_temperatures=[{','.join(map(str, given))}]"
    if not chosen.offers.read_confidences:
        return f"{shown} is read only with drafter.stop=confidence or verify.budget; leave it out"
    if chosen.sizes is not None:
        return f"{shown} is for the drafts of a chain; use tree=none or drafter.confidence_temperatures=null"
    if len(given) == num_drafts:
        return None
    fits = ",".join(["1.0"] * num_drafts)
    remedy = f"use drafter.confidence_temperatures=[{fits}]"
    return f"{shown} has {len(given)} temperatures for {num_drafts} drafts; {remedy}"


def there_are_drafts(chosen: Chosen) -> str | None:
    """There must be a drafter, since plain decoding offers nothing."""
    if chosen.drafter.drafts:
        return None
    return f"{chosen.offers.named} has no drafts to choose from with drafter={chosen.config.drafter.name}; leave it out"


def confidence_is_noted(chosen: Chosen) -> str | None:
    """The drafter must report its confidence if something uses it."""
    option, budget = chosen.drafter, chosen.offers.budget
    if not option.drafts or option.notes_confidence or not chosen.offers.read_confidences:
        return None
    named, remedy = ("drafter.stop=confidence", "drafter.stop=none")
    if budget is not None:
        named, remedy = f"verify.budget={budget}", "verify.budget=null"
    return (
        f"{named} uses the drafter's confidence, but drafter={option.name} records none; use {remedy}, or "
        "drafter=eagle3"
    )


def a_row_is_left_for_drafts(chosen: Chosen) -> str | None:
    """The budget must exceed the batch size, since each request's pending token always takes a row of it."""
    config = chosen.config
    budget = config.verify.budget
    if budget is None or budget > config.batch_size:
        return None
    return (
        f"verify.budget={budget} leaves no row for drafts, since each of batch_size={config.batch_size} requests needs "
        f"one; use verify.budget={2 * config.batch_size}, or verify.budget=null for all rows"
    )


def depth_is_scheduled_by_nobody(chosen: Chosen) -> str | None:
    """The depth of a tree is the same for every number of running requests."""
    if chosen.sizes is None or chosen.offers.ranges is None:
        return None
    return (
        f"{chosen.offers.named} chooses the K of a chain, but tree={chosen.tree.name} has one depth; use tree=none, or "
        "drafter.k_schedule=null with verify.budget"
    )


def trees_have_one_depth(chosen: Chosen) -> str | None:
    """A K for each request needs chains."""
    if chosen.sizes is None or chosen.offers.by_request == ByRequest.same:
        return None
    return (
        f"drafter.by_request={chosen.offers.by_request} is the K of a chain, but tree={chosen.tree.name} has one "
        "depth; use tree=none or drafter.by_request=same"
    )


def off_is_read(chosen: Chosen) -> str | None:
    """Drafting is only switched off for a request if its acceptance is measured."""
    drafter = chosen.config.drafter
    if drafter.off_below == 0 or drafter.by_request == ByRequest.acceptance:
        return None
    return (
        f"drafter.off_below={drafter.off_below} is not read by drafter.by_request={drafter.by_request}; leave it out "
        "or use drafter.by_request=acceptance"
    )


def rows_are_noted(chosen: Chosen) -> str | None:
    """The rows of a tree must have confidences, and must not be sampled, since choosing sampled rows by confidence
    would change their distribution."""
    if chosen.sizes is None:
        return None
    if chosen.tree.noting is None:
        return (
            f"{chosen.offers.named} leaves out rows, but tree={chosen.tree.name} stores no confidence of rows; use "
            f"{chosen.offers.offers_all}"
        )
    if not drafts_are_drawn(chosen.config):
        return None
    return (
        f"{chosen.offers.named} would leave out rows of tree={chosen.tree.name} "
        "depending on the draws, and so change the distribution "
        f"of the drafts; use drafter.draft_sampling=greedy or {chosen.offers.offers_all}"
    )


def rule_takes_fewer(chosen: Chosen) -> str | None:
    """The rule must support requests that offer fewer than K drafts."""
    rule = chosen.rule
    if rule.takes_fewer_drafts:
        return None
    return (
        f"{chosen.offers.named} leaves out drafts, which acceptance={rule.name} would not see; use "
        f"{lossless_rule(chosen.config)} or {chosen.offers.offers_all}"
    )


def recorded_rows_are_all_offered(chosen: Chosen) -> str | None:
    """Recorded verify rows need all drafts offered, since other rules judge them again."""
    config = chosen.config
    if config.record.topk < 1:
        return None
    return (
        f"record.topk={config.record.topk} needs rounds in which all drafts are offered; use record.topk=0 or "
        f"{chosen.offers.offers_all}"
    )


def _where_fewer_are_offered(check: Check) -> Check:
    """Return the same check, restricted to runs in which a request may offer fewer than K drafts."""

    @wraps(check)
    def asked(chosen: Chosen) -> str | None:
        return check(chosen) if chosen.offers.may_be_fewer else None

    return asked


OFFER_CHECKS: tuple[Check, ...] = (
    schedule_can_be_read,
    threshold_is_read,
    temperatures_are_read,
    off_is_read,
    a_row_is_left_for_drafts,
    *map(
        _where_fewer_are_offered,
        (
            there_are_drafts,
            confidence_is_noted,
            depth_is_scheduled_by_nobody,
            trees_have_one_depth,
            rows_are_noted,
            rule_takes_fewer,
            recorded_rows_are_all_offered,
        ),
    ),
)
