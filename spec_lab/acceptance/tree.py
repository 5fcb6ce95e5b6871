"""Rules judge a tree of drafts from the root down."""

from __future__ import annotations

import torch

from spec_kernels.noise_reference import Use, race, round_key
from spec_lab.acceptance.distribution import SamplingParams, probabilities
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.core.draft_tree import ancestors_and_self
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
        seeds = self._seeds.of(judged.slot_ids).unsqueeze(1)
        rows = torch.arange(judged.tokens.shape[1], device=seeds.device)
        keys = round_key(seeds, judged.kv_lens.unsqueeze(1), rows, Use.EMIT)
        return follow(race(probabilities(judged.logits, self._sampling), keys), judged, depth)


class SyntheticTreeAcceptance(SyntheticAcceptance):
    """Keeps the protocol `TreeRule`: imposes the number of accepted drafts, and the first path that is as long.

    A tree that has no path so long gives its longest.
    """

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        visible = ancestors_and_self(judged.parents, depth)
        depths = visible.sum(dim=2) - 1
        imposed = (self.draws(judged.slot_ids, judged.kv_lens).unsqueeze(1) < self._rates).sum(dim=1, keepdim=True)
        num_accepted = torch.minimum(imposed, depths.amax(dim=1, keepdim=True))
        last = (depths == num_accepted).int().argmax(dim=1, keepdim=True)
        on_path = visible.gather(1, last.unsqueeze(2).expand_as(visible[:, :1])).squeeze(1)
        columns = torch.arange(depth + 1, device=depths.device)
        at_depth = on_path.unsqueeze(1) & (depths.unsqueeze(1) == columns.view(1, -1, 1))
        rows = behind_stays(at_depth.int().argmax(dim=2), num_accepted, judged.tokens.shape[1])
        best = judged.logits.argmax(dim=-1).gather(1, last)
        drafts = judged.tokens.gather(1, rows).roll(-1, dims=1)
        tokens = drafts.scatter(1, num_accepted, best)
        return Walk(Verification(tokens, torch.where(judged.active, num_accepted.squeeze(1) + 1, 0)), rows)


def follow(chosen: torch.Tensor, judged: JudgedRows, depth: int) -> Walk:
    """Follow `chosen` [batch, N], the token that the target puts behind each row, from the root as long as it has been
    drafted.

    The tokens of the path are those that were chosen, so the last of them is the correction or, below a leaf, the bonus
    token.
    """
    is_draft = torch.arange(chosen.shape[1], device=chosen.device) > 0
    row = torch.zeros_like(chosen[:, :1])
    goes_on = judged.active.unsqueeze(1)
    path, num_accepted = [row], torch.zeros_like(row)
    for _ in range(depth):
        hits = is_draft & (judged.parents == row) & (judged.tokens == chosen.gather(1, row))
        goes_on = goes_on & hits.any(dim=1, keepdim=True)
        row = torch.where(goes_on, hits.int().argmax(dim=1, keepdim=True), row)
        num_accepted = num_accepted + goes_on
        path.append(row)
    rows = behind_stays(torch.cat(path, dim=1), num_accepted, chosen.shape[1])
    num_emitted = torch.where(judged.active, num_accepted.squeeze(1) + 1, 0)
    return Walk(Verification(chosen.gather(1, rows), num_emitted), rows)


def behind_stays(path: torch.Tensor, num_accepted: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Keep of `path` [batch, depth + 1] the first `num_accepted` + 1 ([batch, 1]) rows; behind them the rows stay where
    they are, as those of a chain do."""
    columns = torch.arange(path.shape[1], device=path.device)
    return torch.where(columns <= num_accepted, path, columns.clamp(max=num_rows - 1))
