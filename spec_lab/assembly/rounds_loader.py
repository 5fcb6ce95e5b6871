"""This module makes the round of a configuration: of a chain, of a tree, or of requests that may offer fewer drafts."""

from __future__ import annotations

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.assembly.limits import Limits
from spec_lab.assembly.models import Models
from spec_lab.assembly.run_offers import k_schedule, may_offer_fewer, reads_confidences, stop_threshold
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import RunConfig
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.drafts import Chain, Tree, TreeParts
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.offers import AllOffered, Counted
from spec_lab.engine.parts import Parts
from spec_lab.engine.round import DecodeRound, Rounds


def build_confidences(config: RunConfig, limits: Limits, models: Models) -> DraftConfidences | None:
    """Make the place where the drafter notes how sure it is of its drafts; None where nothing asks."""
    if not reads_confidences(config):
        return None
    sizes = limits.num_slots, config.drafter.num_draft_tokens
    return DraftConfidences(*sizes, models.device, stop_threshold(config), models.kernels.note_confidence)


def build_rounds(
    config: RunConfig,
    parts: Parts,
    limits: Limits,
    confidences: DraftConfidences | None,
    recorder: GraphRecorder | None,
    models: Models,
) -> Rounds:
    """Make the rounds of an engine, of which `recorder` captures stretches: one, or one for each K of a schedule."""
    sizes, most = tree_sizes(config), parts.drafter.num_draft_tokens
    if sizes is not None:
        tree = Tree(parts, TreeParts.of(parts, models.kernels.trees.move_path), sizes.num_rows, limits.page_size)
        return Rounds(DecodeRound(parts, tree, AllOffered(most)))
    chain = Chain(parts)
    if not may_offer_fewer(config):
        return Rounds(DecodeRound(parts, chain, AllOffered(most)))
    budget, count = config.verify.budget, models.kernels.count_offered
    offered = DraftOffers(limits.num_slots, models.device, confidences, budget, count)
    schedule = k_schedule(config)
    choices = (most,) if schedule is None else schedule.choices
    assert choices[0] == most, "the largest K is what slots have room for"
    rounds = {k: DecodeRound(parts, chain, Counted(parts, offered, k, recorder)) for k in choices}
    return Rounds(rounds[most], schedule, rounds)
