"""The assistant's two heads: what greedy picks, ties, and ids in range whatever comes in."""

from __future__ import annotations

import pytest
import torch

from spec_lab.models.gemma4_assistant import CentroidHead, DenseHead

VOCAB, HIDDEN, CLUSTERS, TOP_K = 60, 8, 12, 3


def random_head(seed: int = 0) -> tuple[CentroidHead, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    centroids = torch.randn(CLUSTERS, HIDDEN, generator=generator)
    ordering = torch.randperm(VOCAB, generator=generator)
    return CentroidHead(embedding, centroids, ordering, TOP_K), embedding, centroids, ordering


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
