"""Likeliest siblings are picked by `spec_kernels` in place of torch's operators, from the tokens that the head has."""

from __future__ import annotations

import torch

from spec_kernels.tree_rank import rank_tokens
from spec_lab.drafters.picking import DraftedRows, GivenDrafts
from spec_lab.drafters.siblings import BranchHead, Ranked, empty_ranks


class TritonLikeliestSiblings(GivenDrafts):
    """It picks what `LikeliestSiblings` does, in two kernels, on ties too.

    Ties go by the order of the draft vocabulary, which is the target's where its map rises. Sums of exponentials round
    in another order: a tree differs where two drafts are as near as that.
    """

    def __init__(self, topk: int) -> None:
        self._topk = topk

    def pick(self, head: BranchHead, hidden: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        scored = head.scored_tokens(hidden.flatten(0, 1))
        ranked = empty_ranks(scored.logits, (*hidden.shape[:2], self._topk))
        parts = ranked.tokens.flatten(0, 1), ranked.log_probs.flatten(0, 1)
        rank_tokens(*parts, scored.logits, scored.token_ids)
        return ranked
