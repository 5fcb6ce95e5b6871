"""This module makes the round of a configuration: of a chain, of a tree, or of requests that may offer fewer drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.engine.adaptive_round import adaptive_round
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.offers import DraftOffers
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.tree_round import tree_round
from spec_lab.menu.chosen import Chosen
from spec_lab.wiring.limits import Limits
from spec_lab.wiring.models import TargetBuild


def build_confidences(chosen: Chosen, limits: Limits, built: TargetBuild) -> DraftConfidences | None:
    """Make the place where the drafter notes how sure it is of its drafts; None where nothing asks."""
    if not chosen.offers.read_confidences:
        return None
    sizes = limits.num_slots, chosen.config.drafter.num_draft_tokens
    return DraftConfidences(*sizes, built.device, chosen.offers.threshold, built.kernels.note_confidence)


def round_maker(
    chosen: Chosen,
    limits: Limits,
    confidences: DraftConfidences | None,
    recorder: GraphRecorder | None,
    built: TargetBuild,
) -> Callable[[Any], DecodeRound]:
    """Return the function that makes the round of an engine's `Parts`, of which `recorder` captures stretches."""
    sizes = chosen.sizes
    if sizes is not None:
        return partial(tree_round, sizes.num_rows, limits.page_size, move_path=built.kernels.trees.move_path)
    if not chosen.offers.may_be_fewer:
        return DecodeRound
    budget, count = chosen.offers.budget, built.kernels.count_offered
    offers = DraftOffers(limits.num_slots, built.device, confidences, budget, count)
    return partial(adaptive_round, offers, chosen.offers.schedule, recorder)
