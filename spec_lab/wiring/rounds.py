"""This module makes the rounds of a configuration: of a chain or a tree, with all drafts or as many as are offered."""

from __future__ import annotations

from spec_lab.acceptance.confidences import DraftConfidences, RowConfidences
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.drafts import Chain, Tree, TreeParts
from spec_lab.engine.host_drafts import HostDrafts
from spec_lab.engine.offered import DraftOffers, RowOffers
from spec_lab.engine.offers import AllOffered, Counted, CountedRows
from spec_lab.engine.parts import Parts
from spec_lab.engine.plain_round import PlainRound
from spec_lab.engine.request_k import GivenK, RequestK, RequestLimits, RunningK
from spec_lab.engine.round import DecodeRound, Rounds
from spec_lab.menu.choices import ByRequest
from spec_lab.menu.chosen import Chosen
from spec_lab.wiring.drafting import DrafterResources
from spec_lab.wiring.limits import Limits
from spec_lab.wiring.models import TargetBuild


def build_confidences(chosen: Chosen, limits: Limits, built: TargetBuild) -> DraftConfidences | None:
    """Make the place where the drafter notes how sure it is of its drafts; None where nothing asks."""
    if not chosen.offers.read_confidences or chosen.sizes is not None:
        return None
    sizes = limits.num_slots, chosen.config.drafter.num_draft_tokens
    offers = chosen.offers
    return DraftConfidences(*sizes, built.device, offers.threshold, built.kernels, offers.temperatures)


def build_row_confidences(chosen: Chosen, limits: Limits, built: TargetBuild) -> RowConfidences | None:
    """Make the same for the rows of a tree."""
    if not chosen.offers.read_confidences or chosen.sizes is None:
        return None
    return RowConfidences(limits.num_slots, chosen.sizes.num_rows, built.device, chosen.offers.threshold)


def build_rounds(
    chosen: Chosen,
    parts: Parts,
    resources: DrafterResources,
    recorder: GraphRecorder | None,
    built: TargetBuild,
) -> Rounds:
    """Make the rounds of an engine, of which `recorder` captures stretches: one, or one for each K of a schedule."""
    most, offers = parts.drafter.num_draft_tokens, chosen.offers
    if chosen.sizes is not None:
        tree = TreeParts.of(parts, built.kernels)
        drafts = Tree(parts, tree, chosen.sizes.num_rows, resources.limits.page_size)
        if resources.row_confidences is None:
            return Rounds(DecodeRound(parts, drafts, AllOffered(most)))
        rows = RowOffers(resources.row_confidences, offers.budget)
        return Rounds(DecodeRound(parts, drafts, CountedRows(parts, rows, most, recorder)))
    chain = Chain(parts)
    if not offers.may_be_fewer:
        return Rounds(DecodeRound(parts, chain, AllOffered(most)))
    is_own = offers.by_request != ByRequest.same
    sizes = resources.limits.num_slots, built.device
    offered = DraftOffers(*sizes, resources.confidences, offers.budget, built.kernels, by_request=is_own)
    choices = (most,) if offers.schedule is None else offers.schedule.choices
    assert choices[0] == most, "the largest K is what slots have room for"
    finder = parts.drafter.requirements.on_host
    if finder is not None and finder.num_on_device not in choices:
        choices = (*choices, finder.num_on_device)
    rounds = {k: DecodeRound(parts, chain, Counted(parts, offered, k, recorder)) for k in choices}
    host = None if finder is None else HostDrafts(finder, parts.slots, offered)
    limits = RequestLimits(_request_k(chosen, most), offered) if is_own else None
    return Rounds(rounds[most], offers.schedule, rounds, host, limits, PlainRound(parts, chain) if is_own else None)


def _request_k(chosen: Chosen, most: int) -> RequestK:
    given, drafter = GivenK(most), chosen.config.drafter
    return given if drafter.by_request == ByRequest.given else RunningK(given, drafter.off_below)
