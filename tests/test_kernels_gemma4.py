"""The kernels that Gemma 4's layers have beside those of other families, against their torch forms."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.clusters import likeliest_in_clusters
from spec_kernels.layer_embedding import layer_embeddings
from spec_kernels.norms import add_normed
from spec_kernels.softcap import softcap
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.norms import make_norm
from spec_lab.models.sandwich import AddNormed, LogitCap, PerLayerEmbedding
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scaled", "has_next"), [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("in_float32", [False, True])
def test_a_norm_added_to_the_stream_equals_its_torch_form(
    dtype: torch.dtype, scaled: bool, has_next: bool, in_float32: bool
) -> None:
    """Both summands are views of wider rows, and the two norms have a weight and an eps each."""
    rows, added = randn(3, 44, dtype=dtype)[:, :40], 3 * randn(3, 48, seed=1, dtype=dtype)[:, :40]
    of_norm = torch.float32 if in_float32 else dtype
    weight, next_weight = randn(40, seed=2, dtype=of_norm), randn(40, seed=3, dtype=of_norm)
    scale = torch.tensor([0.7], device=DEVICE, dtype=dtype) if scaled else None
    stream, normed = add_normed(rows, added, weight, EPS, scale, next_weight if has_next else None, 0.5)
    expected = AddNormed(make_norm(weight, EPS, in_float32), scale)(rows, added)
    assert_near(stream, expected)
    if has_next:
        assert_near(normed, make_norm(next_weight, 0.5, in_float32)(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_capped_logits_equal_their_torch_form(dtype: torch.dtype) -> None:
    """Logits on both sides of the cap and far beyond it, in rows that are views of wider ones."""
    logits = 20 * randn(3, 2100, dtype=dtype)[:, :2090]
    got = softcap(logits, 15.0)
    assert_near(got, LogitCap(15.0)(logits))
    assert got.abs().max() <= 15.0 and (got.argmax(1) == logits.argmax(1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_float32", [False, True])
def test_embeddings_of_layers_equal_their_torch_form(dtype: torch.dtype, in_float32: bool) -> None:
    """Three layers of 24 channels, and a token that comes twice."""
    tokens, table = torch.tensor([6, 0, 6], device=DEVICE), randn(7, 72, dtype=dtype)
    projected, weight = randn(3, 80, seed=1, dtype=dtype)[:, :72], randn(24, seed=2)
    weight = weight if in_float32 else weight.to(dtype)
    plain = PerLayerEmbedding(table, 4.0, lambda rows: rows, 0.3, make_norm(weight, EPS, in_float32), 24)
    got = layer_embeddings(tokens, table, 4.0, projected, 0.3, weight, EPS, plain.scale)
    assert_near(got, plain(tokens, projected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_token_of_clusters_is_that_of_torch(dtype: torch.dtype) -> None:
    """Of 140 clusters of five tokens; scores of few values, so that clusters and tokens tie."""
    cluster_logits, rows = (2 * randn(6, 140)).round().to(dtype), randn(6, 72, seed=1).round().to(dtype)
    weight = randn(140, 5, 72, seed=2).round().to(dtype)
    token_ids = torch.randperm(700, generator=torch.Generator().manual_seed(3)).view(140, 5).to(DEVICE)
    arrivals = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    plain = TokenClusters(lambda _: cluster_logits, weight, token_ids, 20)
    assert torch.equal(likeliest_in_clusters(rows, cluster_logits, weight, token_ids, arrivals, 20), plain(rows))
    assert not arrivals.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_junk_rows_find_tokens_of_the_vocabulary(value: float) -> None:
    """A padded row may hold anything; its draft is embedded all the same."""
    weight, token_ids = randn(9, 4, 16), torch.arange(36, device=DEVICE).view(9, 4)
    arrivals, junk = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.full((2, 16), value, device=DEVICE)
    tokens = likeliest_in_clusters(junk, junk[:, :9], weight, token_ids, arrivals, 3)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 36
