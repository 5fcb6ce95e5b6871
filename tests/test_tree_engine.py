"""Rounds whose drafts are a tree, on a fake target without ties: whatever is masked, placed, walked or compacted
wrongly changes a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kv_cache import cache_slots
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import DraftStep, FeatureSpec, Request, VerifiedRound
from spec_lab.engine.engine import Engine
from tests.fake_target import FakeTarget, PaddedGraph, ScriptedDrafter, make_fake_engine, scripted_rounds
from tests.test_engine import check, fake_requests

ROWS, DEPTH, PAGE = 9, 3, 4


@dataclass(slots=True)
class ScriptedTreeState:
    """A drawn tree [batch, ...]; what the engine asks of the state of a chain is left empty."""

    tree: DraftTree
    tokens: None = None
    attention: None = None


class ScriptedTreeDrafter(ScriptedDrafter):
    """Draws a tree for every round, of which one path begins with as many right drafts as the script says, on rows that
    are no prefix of the tree; every other draft is wrong. Siblings differ.
    """

    requirements = DrafterRequirements(FeatureSpec(layer_inputs=(0,)))

    def __init__(
        self,
        depth: int,
        num_rows: int,
        target: FakeTarget,
        script: Sequence[int],
        on_catch_up: Callable[[VerifiedRound], None] | None = None,
    ) -> None:
        super().__init__(depth, target, script, on_catch_up)
        self._num_rows = num_rows
        self._draw = random.Random(depth + num_rows)

    def step(self, state: Any, step: DraftStep) -> None:
        """Do nothing: the tree is drawn at once."""

    def finish(self, state: ScriptedTreeState) -> DraftTree:
        return state.tree

    def _propose(self, slots: list[int], lengths: list[int]) -> Any:
        trees = [self._tree(slot, length) for slot, length in zip(slots, lengths, strict=True)]
        tokens, parents = ([tree[part] for tree in trees] for part in (0, 1))
        return ScriptedTreeState(DraftTree(torch.tensor(tokens), torch.tensor(parents)))

    def _tree(self, slot: int, length: int) -> tuple[list[int], list[int]]:
        draw, depth = self._draw, self.num_draft_tokens
        known, num_right = [0] * depth, 0
        if slot >= 0:
            num_right = self._script[self._drafted[slot] % len(self._script)]
            self._drafted[slot] += 1
            known = (self._texts[slot][length : length + depth] + [0] * depth)[:depth]
        spine = [0, *sorted(draw.sample(range(1, self._num_rows), depth))]
        parents, depths, taken = [0], [0], {}
        tokens: list[int] = []
        for row in range(1, self._num_rows):
            on_spine = row in spine
            open_rows = [other for other in range(row) if depths[other] < depth]
            parent = spine[spine.index(row) - 1] if on_spine else draw.choice(open_rows)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            # The spine's right token is kept from all its siblings.
            siblings = taken.setdefault(parent, {known[depths[parent]]} if parent in spine[:-1] else set())
            is_right = on_spine and depths[row] <= num_right
            wrong = [token for token in range(self._target.vocab_size) if token not in siblings]
            tokens.append(known[depths[parent]] if is_right else draw.choice(wrong))
            siblings.add(tokens[-1])
        return tokens, parents


class Watched:
    """A hook that runs before each catch-up: it looks at what accept has left, then spoils what nobody may read."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.lengths: set[int] = set()

    def __call__(self, verified: VerifiedRound) -> None:
        assert self.engine is not None and verified.features is not None
        batch, emitted = verified.batch, verified.verification
        features = verified.features.view(batch.num_rows, DEPTH + 1, 2).long()
        cache = self.engine.parts.cache.kv
        for row, (length, count) in enumerate(zip(batch.kv_lens.tolist(), emitted.num_emitted.tolist(), strict=True)):
            if not batch.active[row]:
                continue
            self.lengths.add(count)
            expected = [int(batch.input_ids[row, 0]), *emitted.tokens[row, : count - 1].tolist()]
            assert features[row, :count, 0].tolist() == expected, "the features are those of the path"
            assert features[row, :count, 1].tolist() == list(range(length, length + count))
            stale = torch.arange(length + count, length + ROWS).unsqueeze(0)
            cache[:, cache_slots(batch.page_table[row : row + 1], stale, PAGE)[0]] = float("nan")


def make_tree_engine(
    script: list[int], watched: Watched | None = None, num_rows: int = ROWS, depth: int = DEPTH, **options: Any
) -> tuple[Engine, FakeTarget]:
    engine, target = make_fake_engine(
        lambda target: ScriptedTreeDrafter(depth, num_rows, target, script, watched), tree_rows=num_rows, **options
    )
    if watched is not None:
        watched.engine = engine
    return engine, target


@pytest.mark.parametrize("bucket", [1, 4])
def test_several_rounds_with_every_length_accepted(bucket: int) -> None:
    """Rejected rows are poisoned, slots and pages reused, prompts of one token too, pages crossed and rows padded."""
    watched = Watched()
    engine, target = make_tree_engine([0, 3, 1, 2, 3], watched, graph=PaddedGraph(bucket))
    requests = [Request("one", "even", (5,), 12), *fake_requests(8)]
    check(engine, target, requests)
    assert watched.lengths == {1, 2, 3, 4}


@pytest.mark.parametrize("script", [[0], [9], [1], [0, 1, 2, 3]])
def test_a_round_emits_the_right_path_and_one_more(script: list[int]) -> None:
    script = [min(count, DEPTH) for count in script]
    requests = [replace(request, ignore_eos=True) for request in fake_requests(4, max_new_tokens=17)]
    engine, target = make_tree_engine(script, num_slots=2)
    for record in check(engine, target, requests).requests:
        assert record.emitted_per_round == scripted_rounds(17, DEPTH, script)


@pytest.mark.parametrize(("num_rows", "depth", "page_size"), [(2, 1, 1), (4, 3, 4), (16, 2, 16), (33, 5, 1)])
def test_other_sizes(num_rows: int, depth: int, page_size: int) -> None:
    """A tree of one draft, one that is a chain, a broad one and one of more rows than text; the end of sequence falls
    inside paths.
    """
    engine, target = make_tree_engine([depth, 0, 1], num_rows=num_rows, depth=depth, page_size=page_size)
    check(engine, target, fake_requests(6))
