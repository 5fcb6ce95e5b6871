"""The kernels around a draft layer, and the norm, against their torch forms."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.draft_input import draft_input
from spec_kernels.gate import ACTIVATIONS, gated
from spec_kernels.gated_share import add_gated_share
from spec_kernels.likeliest import likeliest
from spec_kernels.norms import add_normed, rms_norm
from spec_kernels.product_tiles import SkinnyTiles
from spec_lab.models.draft_parts import DraftInput, LikeliestToken
from spec_lab.models.norms import Float32Norm, RMSNorm
from spec_lab.operators.triton_linear import ACTIVATIONS as FUNCTIONS
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 40), (3, 1100)])
def test_a_norm_equals_its_torch_form(dtype: torch.dtype, num_rows: int, size: int) -> None:
    rows, weight = 3 * randn(num_rows, size + 4, dtype=dtype)[:, :size], randn(size, seed=1, dtype=dtype)
    assert_near(rms_norm(rows, weight, EPS), RMSNorm(weight, EPS)(rows))
    assert_near(rms_norm(rows, weight.float(), EPS), Float32Norm(weight.float(), EPS)(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_equal_their_torch_form(dtype: torch.dtype) -> None:
    """The two summands are views of wider rows, of different widths."""
    rows, added = randn(3, 44, dtype=dtype)[:, :40], randn(3, 48, seed=1, dtype=dtype)[:, :40]
    weight = randn(40, seed=2, dtype=dtype)
    stream, normed = add_normed(rows, added, None, 0.0, None, weight, EPS)
    assert torch.equal(stream, rows + added)
    assert_near(normed, RMSNorm(weight, EPS)(stream))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 40), (3, 1030)])
def test_a_gate_equals_its_torch_form(dtype: torch.dtype, num_rows: int, size: int, activation: str) -> None:
    """Gates and what they let through are views of wider rows, of different widths."""
    gate = 3 * randn(num_rows, size + 4, dtype=dtype)[:, :size]
    up = randn(num_rows, size + 2, seed=1, dtype=dtype)[:, :size]
    (function,) = (function for function, name in FUNCTIONS.items() if name == activation)
    assert_near(gated(gate, up, activation), function(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_share_equals_its_torch_form(dtype: torch.dtype) -> None:
    """Stream and rows are views of wider rows, of different widths."""
    stream, rows = randn(3, 44, dtype=dtype)[:, :40], randn(3, 48, seed=1, dtype=dtype)[:, :40]
    gate, added = 0.2 * randn(1, 40, seed=2, dtype=dtype), randn(3, 40, seed=3, dtype=dtype)
    share = torch.sigmoid((rows.float() @ gate.float().T).to(dtype))
    assert_near(add_gated_share(stream, rows, gate, added), stream + share * added)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_input_equals_its_torch_form(dtype: torch.dtype) -> None:
    """The two norms differ in weight and eps, and the hidden states are a view of wider rows."""
    size, tokens = 40, torch.tensor([6, 0, 6], device=DEVICE)
    embedding, hidden = randn(7, size, dtype=dtype), randn(3, 2 * size, seed=1, dtype=dtype)[:, size:]
    norms = randn(size, seed=2, dtype=dtype), randn(size, seed=3, dtype=dtype)
    plain = DraftInput(embedding, RMSNorm(norms[0], EPS), RMSNorm(norms[1], 0.5))
    assert_near(draft_input(tokens, embedding, norms[0], EPS, hidden, norms[1], 0.5), plain(tokens, hidden)[0])


def top_of(
    rows: torch.Tensor, head: torch.Tensor, weighed: bool = True, **parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and probabilities."""
    arrivals = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = likeliest(rows, head, arrivals, parts.get("norm_weight"), EPS, parts.get("token_map"), weighed)
    assert not arrivals.any(), "the last program leaves zeros"
    return found


def top_in_torch(rows: torch.Tensor, head: torch.Tensor, **parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    norm = RMSNorm(parts["norm_weight"], EPS) if "norm_weight" in parts else None
    plain = LikeliestToken(
        norm, lambda normed: (normed.float() @ head.float().T).to(rows.dtype), parts.get("token_map")
    )
    return plain.with_probability(rows)


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
    got, expected = top_of(rows, head, **chosen), top_in_torch(rows, head, **chosen)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[0], top_of(rows, head, False, **chosen)[0])
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
    assert top_of(rows, head, False)[0].tolist() == [3, 0]
    tokens, probabilities = top_of(rows, head)
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
    tokens, probabilities = top_of(rows, head)
    alone, expected = top_of(rows[:3], head), top_in_torch(rows, head)
    assert torch.equal(alone[0], tokens[:3]) and torch.equal(alone[1], probabilities[:3]), "bit for bit"
    assert torch.equal(expected[0], tokens)
    torch.testing.assert_close(expected[1], probabilities, rtol=2e-5, atol=0)
    assert probabilities.min() < 0.03 and probabilities.max() > 0.99
