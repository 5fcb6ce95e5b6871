"""The rules on trees run `spec_kernels` in place of torch's operators: same decisions, on ties too."""

from __future__ import annotations

import torch

from spec_kernels.tree_draw import draw_rows
from spec_kernels.tree_walk import follow_argmax, follow_chosen, impose_path
from spec_lab.acceptance.distribution import truncate
from spec_lab.acceptance.tree import OneHotTreeAcceptance, StrictTreeAcceptance, SyntheticTreeAcceptance
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


def empty_walk(judged: JudgedRows, depth: int) -> Walk:
    """Make room for a walk."""
    tokens, path = judged.tokens.new_empty((2, judged.tokens.shape[0], depth + 1))
    return Walk(Verification(tokens, judged.tokens.new_empty(tokens.shape[0])), path)


class TritonStrictTreeAcceptance(StrictTreeAcceptance):
    """It walks where `StrictTreeAcceptance` does, in two kernels."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        walk = empty_walk(judged, depth)
        tokens, num_emitted = walk.verification.tokens, walk.verification.num_emitted
        follow_argmax(tokens, num_emitted, walk.path, judged.logits, judged.tokens, judged.parents, judged.active)
        return walk


class TritonOneHotTreeAcceptance(OneHotTreeAcceptance):
    """It draws and walks as `OneHotTreeAcceptance` does, with the same noise, in three kernels.

    Truncation by top-k and top-p sorts, and is torch's.
    """

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        walk, sampling, logits = empty_walk(judged, depth), self._sampling, judged.logits
        temperature = sampling.temperature
        if temperature == 0:
            return super().walk(judged, depth)
        if sampling.top_k is not None or sampling.top_p is not None:
            logits, temperature = truncate(logits.float() / temperature, sampling.top_k, sampling.top_p), 1.0
        chosen = torch.empty_like(judged.tokens, memory_format=torch.contiguous_format)
        draw_rows(chosen, logits, judged.slot_ids, self._seeds.values, judged.kv_lens, temperature)
        tokens, num_emitted = walk.verification.tokens, walk.verification.num_emitted
        follow_chosen(tokens, num_emitted, walk.path, chosen, judged.tokens, judged.parents, judged.active)
        return walk


class TritonSyntheticTreeAcceptance(SyntheticTreeAcceptance):
    """It takes the path that `SyntheticTreeAcceptance` does, in two kernels."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        walk = empty_walk(judged, depth)
        impose_path(
            walk.verification.tokens,
            walk.verification.num_emitted,
            walk.path,
            judged.logits,
            judged.tokens,
            judged.parents,
            judged.active,
            self._rates,
            judged.slot_ids,
            self._seeds.values,
            judged.kv_lens,
        )
        return walk
