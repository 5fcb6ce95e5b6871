"""Rules judge a tree of drafts from the root down."""

from __future__ import annotations

import torch

from spec_kernels.noise_reference import Use, race, round_key
from spec_kernels.tree_reference import follow_reference, impose_reference
from spec_lab.acceptance.distribution import SamplingParams, probabilities
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


class StrictTreeAcceptance(StrictAcceptance):
    """Keeps the protocol `TreeRule`: follows the target's argmax from the root as long as it has been drafted."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        return follow(judged.logits.argmax(dim=-1), judged, depth)


class OneHotTreeAcceptance(RejectionAcceptance):
    """Keeps the protocol `TreeRule`: draws each token from the target, and follows the child that holds it.

    SGLang's `tree_speculative_sampling_target_only` tries the children one after another instead, which has the same
    law at thresholds of 1. Drafts are given, so nothing is gained by knowing how likely the drafter thought them.
    """

    def __init__(self, sampling: SamplingParams, seeds: SlotSeeds) -> None:
        super().__init__(METHODS["one_hot"], sampling, seeds)

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        return follow(self.draw(judged), judged, depth)

    def draw(self, judged: JudgedRows) -> torch.Tensor:
        """Draw the token [batch, N] behind each row."""
        seeds = self._seeds.of(judged.slot_ids).unsqueeze(1)
        rows = torch.arange(judged.tokens.shape[1], device=seeds.device)
        keys = round_key(seeds, judged.kv_lens.unsqueeze(1), rows, Use.EMIT)
        return race(probabilities(judged.logits, self._sampling), keys)


class SyntheticTreeAcceptance(SyntheticAcceptance):
    """Keeps the protocol `TreeRule`: imposes the number of accepted drafts, and the first path that is as long.

    A tree that has no path so long gives its longest.
    """

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        imposed = (self.draws(judged.slot_ids, judged.kv_lens).unsqueeze(1) < self._rates).sum(dim=1, keepdim=True)
        best = judged.logits.argmax(dim=-1)
        tokens, num_emitted, path = impose_reference(imposed, best, judged.tokens, judged.parents, judged.active, depth)
        return Walk(Verification(tokens, num_emitted), path)


def follow(chosen: torch.Tensor, judged: JudgedRows, depth: int) -> Walk:
    """Follow `chosen` [batch, N], the token that the target puts behind each row, from the root as long as it has been
    drafted."""
    tokens, num_emitted, path = follow_reference(chosen, judged.tokens, judged.parents, judged.active, depth)
    return Walk(Verification(tokens, num_emitted), path)
