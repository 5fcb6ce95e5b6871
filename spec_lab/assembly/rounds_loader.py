"""This module makes the round of a configuration: of a chain, of a tree, or of requests that may offer fewer drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.assembly.limits import Limits
from spec_lab.assembly.models import Models
from spec_lab.assembly.run_offers import k_schedule, may_offer_fewer, reads_confidences, stop_threshold
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import RunConfig
from spec_lab.engine.adaptive_round import adaptive_round
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.offers import DraftOffers
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.tree_round import tree_round


def build_confidences(config: RunConfig, limits: Limits, models: Models) -> DraftConfidences | None:
    """Make the place where the drafter notes how sure it is of its drafts; None where nothing asks."""
    if not reads_confidences(config):
        return None
    sizes = limits.num_slots, config.drafter.num_draft_tokens
    return DraftConfidences(*sizes, models.device, stop_threshold(config), models.kernels.note_confidence)


def round_maker(
    config: RunConfig,
    limits: Limits,
    confidences: DraftConfidences | None,
    recorder: GraphRecorder | None,
    models: Models,
) -> Callable[[Any], DecodeRound]:
    """Return the function that makes the round of an engine's `Parts`, of which `recorder` captures stretches."""
    sizes = tree_sizes(config)
    if sizes is not None:
        return partial(tree_round, sizes.num_rows, limits.page_size, move_path=models.kernels.trees.move_path)
    if not may_offer_fewer(config):
        return DecodeRound
    budget, count = config.verify.budget, models.kernels.count_offered
    offers = DraftOffers(limits.num_slots, models.device, confidences, budget, count)
    return partial(adaptive_round, offers, k_schedule(config), recorder)
