"""The kernels that Gemma 4's layers have beside those of other families, against their references."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.clusters import likeliest_in_clusters, likeliest_in_clusters_reference
from spec_kernels.layer_embedding import layer_embeddings, layer_embeddings_reference
from spec_kernels.norms import add_normed, add_normed_reference
from spec_kernels.softcap import softcap, softcap_reference
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scaled", "has_next"), [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("in_float32", [False, True])
def test_a_norm_added_to_the_stream_equals_its_reference(
    dtype: torch.dtype, scaled: bool, has_next: bool, in_float32: bool
) -> None:
    """Both summands are views of wider rows, and the two norms have a weight and an eps each."""
    rows, added = randn(3, 44, dtype=dtype)[:, :40], 3 * randn(3, 48, seed=1, dtype=dtype)[:, :40]
    of_norm = torch.float32 if in_float32 else dtype
    weight, next_weight = randn(40, seed=2, dtype=of_norm), randn(40, seed=3, dtype=of_norm)
    scale = torch.tensor([0.7], device=DEVICE, dtype=dtype) if scaled else None
    results = []
    for function in (add_normed, add_normed_reference):
        stream, out = nan(3, 40, dtype=dtype), nan(3, 40, dtype=dtype) if has_next else None
        function(stream, out, rows, added, weight, EPS, scale, next_weight if has_next else None, 0.5)
        results.append((stream, out))
    assert_near(results[0][0], results[1][0])
    if has_next:
        assert_near(results[0][1], results[1][1])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_capped_logits_equal_their_reference(dtype: torch.dtype) -> None:
    """Logits on both sides of the cap and far beyond it, in rows that are views of wider ones."""
    logits = 20 * randn(3, 2100, dtype=dtype)[:, :2090]
    got, expected = nan(3, 2090), nan(3, 2090)
    softcap(got, logits, 15.0)
    softcap_reference(expected, logits, 15.0)
    assert_near(got, expected)
    assert got.abs().max() <= 15.0 and (got.argmax(1) == logits.argmax(1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_float32", [False, True])
def test_embeddings_of_layers_equal_their_reference(dtype: torch.dtype, in_float32: bool) -> None:
    """Three layers of 24 channels, and a token that comes twice."""
    tokens, table = torch.tensor([6, 0, 6], device=DEVICE), randn(7, 72, dtype=dtype)
    projected, weight = randn(3, 80, seed=1, dtype=dtype)[:, :72], randn(24, seed=2)
    weight = weight if in_float32 else weight.to(dtype)
    results = [nan(3, 3, 24, dtype=dtype) for _ in range(2)]
    for out, function in zip(results, (layer_embeddings, layer_embeddings_reference), strict=True):
        function(out, tokens, table, 4.0, projected, 0.3, weight, EPS, 2**-0.5)
    assert_near(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_token_of_clusters_is_that_of_the_reference(dtype: torch.dtype) -> None:
    """Of 140 clusters of five tokens; scores of few values, so that clusters and tokens tie."""
    cluster_logits, rows = (2 * randn(6, 140)).round().to(dtype), randn(6, 72, seed=1).round().to(dtype)
    weight = randn(140, 5, 72, seed=2).round().to(dtype)
    token_ids = torch.randperm(700, generator=torch.Generator().manual_seed(3)).view(140, 5).to(DEVICE)
    arrivals, results = torch.zeros(8, dtype=torch.int32, device=DEVICE), []
    for function in (likeliest_in_clusters, likeliest_in_clusters_reference):
        tokens = torch.full((6,), -7, device=DEVICE)
        function(tokens, rows, cluster_logits, weight, token_ids, arrivals, 20)
        results.append(tokens)
    assert torch.equal(*results) and not arrivals.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_junk_rows_find_tokens_of_the_vocabulary(value: float) -> None:
    """A padded row may hold anything; its draft is embedded all the same."""
    weight, token_ids = randn(9, 4, 16), torch.arange(36, device=DEVICE).view(9, 4)
    tokens, arrivals = torch.full((2,), -7, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    junk = torch.full((2, 16), value, device=DEVICE)
    likeliest_in_clusters(tokens, junk, junk[:, :9], weight, token_ids, arrivals, 3)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 36
