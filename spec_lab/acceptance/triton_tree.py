"""The rules on trees run `spec_kernels` in place of torch's operators: same decisions, on ties too."""

from __future__ import annotations

from spec_kernels.tree_walk import follow_argmax, follow_chosen, impose_path
from spec_lab.acceptance.tree import OneHotTreeAcceptance, StrictTreeAcceptance, SyntheticTreeAcceptance
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


def empty_walk(judged: JudgedRows, depth: int) -> Walk:
    """Makes room for a walk."""
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
    """It walks where `OneHotTreeAcceptance` does, in a kernel; what is drawn behind each row is drawn in torch."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        walk, chosen = empty_walk(judged, depth), self.draw(judged)
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
