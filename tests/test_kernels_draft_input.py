"""The kernels around a draft layer, and the norm, against their references."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.draft_input import draft_input, draft_input_reference
from spec_kernels.gate import ACTIVATIONS, gated, gated_reference
from spec_kernels.gated_share import add_gated_share, add_gated_share_reference
from spec_kernels.likeliest import likeliest, likeliest_reference
from spec_kernels.norms import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from spec_kernels.product_tiles import SkinnyTiles
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 40), (3, 1100)])
def test_a_norm_equals_its_reference(dtype: torch.dtype, num_rows: int, size: int) -> None:
    rows, weight = 3 * randn(num_rows, size + 4, dtype=dtype)[:, :size], randn(size, seed=1, dtype=dtype)
    got, expected = (torch.full((num_rows, size), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    rms_norm(got, rows, weight, EPS)
    rms_norm_reference(expected, rows, weight, EPS)
    assert_near(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_equal_their_reference(dtype: torch.dtype) -> None:
    """The two summands are views of wider rows, of different widths."""
    rows, added = randn(3, 44, dtype=dtype)[:, :40], randn(3, 48, seed=1, dtype=dtype)[:, :40]
    weight, results = randn(40, seed=2, dtype=dtype), []
    for function in (add_rms_norm, add_rms_norm_reference):
        out, stream = (torch.full((3, 40), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        function(out, stream, rows, added, weight, EPS)
        results.append((out, stream))
    assert torch.equal(results[0][1], results[1][1])
    assert_near(results[0][0], results[1][0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 40), (3, 1030)])
def test_a_gate_equals_its_reference(dtype: torch.dtype, num_rows: int, size: int, activation: str) -> None:
    """Gates and what they let through are views of wider rows, of different widths."""
    gate, up = (
        3 * randn(num_rows, size + 4, dtype=dtype)[:, :size],
        randn(num_rows, size + 2, seed=1, dtype=dtype)[:, :size],
    )
    got, expected = (torch.full((num_rows, size), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    gated(got, gate, up, activation)
    gated_reference(expected, gate, up, activation)
    assert_near(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_share_equals_its_reference(dtype: torch.dtype) -> None:
    """Stream and rows are views of wider rows, of different widths."""
    stream, rows = randn(3, 44, dtype=dtype)[:, :40], randn(3, 48, seed=1, dtype=dtype)[:, :40]
    gate, added = 0.2 * randn(1, 40, seed=2, dtype=dtype), randn(3, 40, seed=3, dtype=dtype)
    got, expected = (torch.full((3, 40), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    add_gated_share(got, stream, rows, gate, added)
    add_gated_share_reference(expected, stream, rows, gate, added)
    assert_near(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_input_equals_its_reference(dtype: torch.dtype) -> None:
    """The two norms differ in weight and eps, and the hidden states are a view of wider rows."""
    size, tokens = 40, torch.tensor([6, 0, 6], device=DEVICE)
    embedding, hidden = randn(7, size, dtype=dtype), randn(3, 2 * size, seed=1, dtype=dtype)[:, size:]
    norms = randn(size, seed=2, dtype=dtype), randn(size, seed=3, dtype=dtype)
    got, expected = (torch.full((3, 2 * size), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    draft_input(got, tokens, embedding, norms[0], EPS, hidden, norms[1], 0.5)
    draft_input_reference(expected, tokens, embedding, norms[0], EPS, hidden, norms[1], 0.5)
    assert_near(got, expected)


def top_of(
    function: object,
    rows: torch.Tensor,
    head: torch.Tensor,
    probabilities: torch.Tensor | None = None,
    **parts: torch.Tensor,
) -> torch.Tensor:
    tokens = torch.full((rows.shape[0],), -7, device=DEVICE)
    arrivals = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    chosen = parts.get("norm_weight"), EPS, parts.get("token_map"), probabilities
    function(tokens, rows, head, arrivals, *chosen)  # type: ignore[operator]
    assert not arrivals.any(), "the last program leaves zeros"
    return tokens


def weighed_top_of(
    function: object, rows: torch.Tensor, head: torch.Tensor, **parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and probabilities, which are NaN before."""
    probabilities = torch.full((rows.shape[0],), float("nan"), device=DEVICE)
    return top_of(function, rows, head, probabilities, **parts), probabilities


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("parts", [(), ("norm_weight",), ("norm_weight", "token_map")])
def test_the_likeliest_token_is_the_argmax(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], turned: bool
) -> None:
    """Five tiles of tokens, of which the last is not whole, and merged three at a time, but for the rest."""
    monkeypatch.setattr("spec_kernels.likeliest.choose_tiles", lambda *_: SkinnyTiles(16, 16, turned=turned))
    monkeypatch.setattr("spec_kernels.likeliest._MERGE_TILE", 2)
    rows, head = randn(17, 40), randn(70, 40, seed=1)
    offered = {"norm_weight": randn(40, seed=2), "token_map": torch.randperm(200, device=DEVICE)[:70]}
    chosen = {name: offered[name] for name in parts}
    got, expected = (weighed_top_of(function, rows, head, **chosen) for function in (likeliest, likeliest_reference))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[0], top_of(likeliest, rows, head, **chosen))
    assert_near(got[1], expected[1])


def test_ties_go_to_the_lowest_token_and_nan_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 3 of the first tile has a copy in the third, which it is merged with; a row of NaN gives token 0, as
    torch.argmax does."""
    monkeypatch.setattr("spec_kernels.likeliest.choose_tiles", lambda *_: SkinnyTiles(16, 16))
    monkeypatch.setattr("spec_kernels.likeliest._MERGE_TILE", 2)
    head = torch.zeros(48, 16, device=DEVICE)
    head[3] = head[40] = 1.0
    rows = torch.ones(2, 16, device=DEVICE)
    rows[1] = float("nan")
    assert top_of(likeliest, rows, head).tolist() == [3, 0]
    tokens, probabilities = weighed_top_of(likeliest, rows, head)
    weight = torch.tensor(16.0).exp()
    assert tokens.tolist() == [3, 0] and probabilities.isnan().tolist() == [False, True]
    assert probabilities[0].item() == pytest.approx((weight / (2 * weight + 46)).item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_probability_is_that_of_the_rounded_logits_whatever_stands_beside_the_row(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Logits of hundreds, whose exponentials overflow: tiles that hardly count beside one that does."""
    monkeypatch.setattr("spec_kernels.likeliest.choose_tiles", lambda *_: SkinnyTiles(16, 16))
    monkeypatch.setattr("spec_kernels.likeliest._MERGE_TILE", 2)
    head = randn(70, 32, seed=1, dtype=dtype)
    rows = randn(16, 32, dtype=dtype) * torch.logspace(-2, 2, 16, device=DEVICE).unsqueeze(1).to(dtype)
    tokens, probabilities = weighed_top_of(likeliest, rows, head)
    for function in (likeliest_reference, likeliest):
        for num_rows in (16, 3):
            alone = weighed_top_of(function, rows[:num_rows], head)
            assert torch.equal(alone[0], tokens[:num_rows])
            if function is likeliest:
                assert torch.equal(alone[1], probabilities[:num_rows]), "bit for bit"
            else:
                torch.testing.assert_close(alone[1], probabilities[:num_rows], rtol=2e-5, atol=0)
    assert probabilities.min() < 0.03 and probabilities.max() > 0.99
