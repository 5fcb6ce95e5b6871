"""The kernels that grow a tree, each against its reference: what is likeliest below branches, which of it goes on, and
which drafts become rows."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.tree_grow import choose_branches, choose_rows
from spec_kernels.tree_rank import rank_tokens
from spec_kernels.tree_reference import rank_tokens_reference
from spec_kernels.utils import INTERPRETED
from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.drafters.growth import Branches, DynamicTree
from spec_lab.drafters.siblings import Ranked, empty_ranks
from tests.drafted_rows import no_rows
from tests.kernel_lab import DEVICE, DTYPES, randn

TRITON = KernelSet({Op.CHOOSE_BRANCHES: choose_branches, Op.CHOOSE_ROWS: choose_rows})


@pytest.mark.parametrize(
    ("rows", "vocab_size", "topk"),
    [
        (1, 2048, 1),
        (2, 1100, 16),
        (2, 70_001, 3),
        *([] if INTERPRETED else [(256, 8192, 4), (64, 32_000, 4), (16, 128_256, 8)]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES)
def test_tokens_are_ranked_as_the_reference_does(rows: int, vocab_size: int, topk: int, dtype: torch.dtype) -> None:
    """Halves as logits, so that there are ties within tiles and between them; rows of a larger tensor; in one row most
    tokens cannot be."""
    logits = ((6 * randn(rows, vocab_size + 16)).round() / 2).to(dtype)[:, :vocab_size]
    logits[0, topk:] = float("-inf")
    token_map = torch.arange(vocab_size, device=DEVICE) * 3
    outcomes = []
    for function in (rank_tokens, rank_tokens_reference):
        ranked = empty_ranks(logits, (rows, topk))
        function(ranked.tokens, ranked.log_probs, logits, token_map)
        outcomes.append(ranked)
    got, expected = outcomes
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    assert got.log_probs.max() <= 0
    plain = empty_ranks(logits, (rows, topk))
    rank_tokens(plain.tokens, plain.log_probs, logits, None)
    assert torch.equal(plain.tokens * 3, got.tokens) and torch.equal(plain.log_probs, got.log_probs)


def test_a_certain_token_is_no_likelier_than_one_and_zero_is_minus_zero() -> None:
    logits = torch.tensor([[0.0, 300.0, 0.0], [-0.0, 0.0, -1.0]], device=DEVICE)
    ranked = empty_ranks(logits, (2, 3))
    rank_tokens(ranked.tokens, ranked.log_probs, logits, None)
    assert ranked.tokens.tolist() == [[1, 0, 2], [0, 1, 2]]
    assert ranked.log_probs[0, 0] == 0


def grow(tree: DynamicTree, levels: list[Ranked], hidden_size: int) -> tuple[list[Branches], DraftTree]:
    """Return the branches and the tree of drafts whose scores are given, whatever the branches are."""
    growth, found = tree.start(levels[0], no_rows(len(levels[0].tokens))), []
    for index, ranked in enumerate(levels[1:], start=1):
        batch, width = levels[index - 1].tokens.shape[:2]
        found.append(tree.branch(growth, randn(batch, width, hidden_size, seed=index)))
        tree.add(growth, ranked)
    return found, tree.finish(growth)


def make_levels(batch: int, depth: int, topk: int, ties: bool) -> list[Ranked]:
    """Drafts of all levels, the best of each branch first; with ties they are multiples of a half."""
    levels = []
    for level in range(depth):
        width = 1 if level == 0 else topk
        log_probs = -randn(batch, width, topk, seed=level).abs().sort(dim=-1).values
        levels.append(
            Ranked(
                torch.arange(batch * width * topk, device=DEVICE).view(batch, width, topk) * 7 + level,
                (log_probs * 2).round() / 2 if ties else log_probs,
            )
        )
    return levels


@pytest.mark.parametrize(
    ("batch", "depth", "topk", "num_rows", "hidden_size"),
    [
        (3, 3, 4, 16, 40),
        (2, 1, 4, 4, 8),
        (2, 5, 3, 30, 700),
        (1, 2, 1, 3, 9),
        (1, 3, 16, 64, 5000),
        (2, 16, 5, 33, 8),
    ],
)
@pytest.mark.parametrize("ties", [True, False])
def test_a_tree_grows_as_the_reference_lets_it(
    batch: int, depth: int, topk: int, num_rows: int, hidden_size: int, ties: bool
) -> None:
    """Branches, what they go on from, and the rows at the end: of equal drafts the earlier, and a parent always."""
    levels = make_levels(batch, depth, topk, ties)
    (expected_branches, expected), (branches, got) = (
        grow(DynamicTree(depth, num_rows, topk, kernels=kernels), levels, hidden_size)
        for kernels in (TORCH_FORMS, TRITON)
    )
    for mine, theirs in zip(branches, expected_branches, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.came_from, theirs.came_from)
        assert torch.equal(mine.hidden, theirs.hidden)
    assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.parents, expected.parents)
    rows = torch.arange(1, num_rows, device=DEVICE)
    assert (got.parents[:, 1:] < rows).all() and (got.parents[:, 0] == 0).all()


def test_scores_that_are_no_numbers_leave_a_tree_of_its_size() -> None:
    levels = make_levels(2, 3, 4, ties=True)
    levels[1].log_probs[0] = float("nan")
    levels[2].log_probs[1, 0] = float("-inf")
    _, tree = grow(DynamicTree(3, 16, 4, kernels=TRITON), levels, 40)
    assert ((tree.parents >= 0) & (tree.parents < 16)).all()
