"""The assistant's two heads: what greedy picks, ties, and ids in range whatever comes in."""

from __future__ import annotations

import pytest
import torch

from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.models.gemma4_assistant import CentroidHead, DenseHead
from spec_lab.models.rope import rotary_table

VOCAB, HIDDEN, CLUSTERS, TOP_K = 60, 8, 12, 3


def random_head(seed: int = 0) -> tuple[CentroidHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    centroids = torch.randn(CLUSTERS, HIDDEN, generator=generator)
    ordering = torch.randperm(VOCAB, generator=generator)
    return CentroidHead(embedding, centroids, ordering, TOP_K), embedding, centroids, ordering


def test_only_the_likeliest_clusters_are_scored() -> None:
    head, embedding, centroids, ordering = random_head()
    hidden = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = head.target_logits(hidden)
    for row, found in zip(hidden, logits, strict=True):
        clusters = (centroids @ row).topk(TOP_K).indices
        tokens = ordering.view(CLUSTERS, -1)[clusters].flatten()
        expected = torch.full((VOCAB,), float("-inf")).index_copy(0, tokens, embedding[tokens] @ row)
        torch.testing.assert_close(found, expected)
    assert head.greedy(hidden).tolist() == logits.argmax(dim=-1).tolist()
    assert not torch.equal(head.greedy(hidden), DenseHead(embedding).greedy(hidden)), "some best token is not scored"


def test_equal_logits_give_the_lowest_id() -> None:
    _, embedding, _, ordering = random_head()
    hidden = torch.zeros(4, HIDDEN)
    head = CentroidHead(embedding, torch.zeros(CLUSTERS, HIDDEN), ordering, TOP_K)
    lowest = int(ordering[: TOP_K * VOCAB // CLUSTERS].min())
    assert head.greedy(hidden).tolist() == [lowest] * 4, "of equal clusters the first ones, of equal tokens the lowest"
    assert DenseHead(embedding).greedy(hidden).tolist() == [0] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_ids_are_in_range_for_junk_rows(value: float) -> None:
    """A padded row may hold anything; its draft is embedded all the same."""
    head, embedding, _, _ = random_head()
    hidden = torch.full((3, HIDDEN), value)
    for tokens in (head.greedy(hidden), DenseHead(embedding).greedy(hidden)):
        assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB


def test_proportional_rope_turns_the_first_pairs_only() -> None:
    """The exponents are those of the whole head, unlike those of the partial RoPE of other families."""
    device = torch.device("cpu")
    first = RopeConfig(100.0, "proportional", partial_rotary_factor=0.25)
    part, whole = (
        rotary_table(rope, 16, 50, torch.float32, device).rows(torch.arange(50))
        for rope in (first, RopeConfig(100.0, "none"))
    )
    turning = [0, 1, 8, 9]
    still = [channel for channel in range(16) if channel not in turning]
    assert torch.equal(part.cos[..., turning], whole.cos[..., turning])
    assert torch.equal(part.signed_sin[..., turning], whole.signed_sin[..., turning])
    assert bool((part.cos[..., still] == 1).all()) and bool((part.signed_sin[..., still] == 0).all())
