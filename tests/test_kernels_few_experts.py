"""The two kernels of experts for up to 16 rows against those of torch, and that no bit of a row depends on the rows
beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from spec_kernels.few_experts import few_experts, num_experts_arrivals
from spec_kernels.gate import ACTIVATIONS
from spec_lab.models.linear import GatedMLP, make_linear
from spec_lab.operators.triton_linear import ACTIVATIONS as NAMES
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.test_kernels_experts import Layer, make_layer

ROWS = 16


@dataclass
class Whole:
    """A layer of experts, with a shared one and a residual or without them."""

    layer: Layer
    shared: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
    residual: torch.Tensor | None

    def run(self, activation: str = "silu") -> torch.Tensor:
        """Run the kernels twice: the second time the counters have been used."""
        layer = self.layer
        given = layer.rows, layer.gate_up, layer.down, layer.expert_ids, layer.weights, *self.shared, self.residual
        num_counters = num_experts_arrivals(layer.rows.shape[1], len(layer.down))
        arrivals = torch.zeros(num_counters, dtype=torch.int32, device=DEVICE)
        for _ in range(2):
            out = few_experts(*given, arrivals, activation)
            assert not arrivals.any()
        return out

    def expected(self, activation: str = "silu") -> torch.Tensor:
        """Run torch's parts in float32, whose sum is rounded once."""
        rows, wide = self.layer.rows.float(), replace(self.layer, rows=self.layer.rows.float())
        total = wide.expected(activation)
        if self.shared[0] is not None and self.shared[1] is not None:
            (function,) = (function for function, name in NAMES.items() if name == activation)
            gate_up, down = (make_linear(weight.float()) for weight in self.shared)
            total = total + GatedMLP(gate_up, down, function)(rows)
        total = total if self.residual is None else total + self.residual.float()
        return total.to(self.layer.rows.dtype)

    def some(self, rows: list[int]) -> Whole:
        return Whole(self.layer.some(rows), self.shared, None if self.residual is None else self.residual[rows])


def make(num_rows: int, num_experts: int = 8, dtype: torch.dtype = torch.float32, num_chosen: int = 3) -> Whole:
    """With a shared expert, and with a residual whose rows lie apart."""
    layer = make_layer(num_rows, num_experts, num_chosen, dtype=dtype)
    shared = (randn(48, 40, seed=7).div(40**0.5).to(dtype), randn(40, 24, seed=8).div(24**0.5).to(dtype))
    return Whole(layer, shared, randn(num_rows, 60, seed=9, dtype=dtype)[:, :40])


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen"),
    [(5, 8, 3), *((1, 3, 3), (2, 64, 8), (ROWS, 4, 1))],
)
def test_equals_the_experts_of_torch(num_rows: int, num_experts: int, num_chosen: int) -> None:
    whole = make(num_rows, num_experts, num_chosen=num_chosen)
    assert_near(whole.run(), whole.expected())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_any_dtype_and_activation_equals_the_experts_of_torch(dtype: torch.dtype, activation: str) -> None:
    whole = make(5, dtype=dtype)
    assert_near(whole.run(activation), whole.expected(activation))


def test_without_a_shared_expert_and_without_a_residual() -> None:
    whole = make(4)
    for part in (Whole(whole.layer, (None, None), whole.residual), Whole(whole.layer, whole.shared, None)):
        assert_near(part.run(), part.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    whole = make(ROWS, dtype=dtype)
    together = whole.run()
    for rows in ([15], [3, 4, 5, 6], [9, 2]):
        assert torch.equal(whole.some(rows).run(), together[rows]), rows


def test_what_nobody_chose_is_not_read_and_a_row_that_is_not_finite_stays_alone() -> None:
    whole = make(3, num_experts=16)
    expected = whole.run()
    is_chosen = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    is_chosen[whole.layer.expert_ids.flatten()] = True
    whole.layer.gate_up[~is_chosen] = float("nan")
    whole.layer.down[~is_chosen] = float("nan")
    assert torch.equal(whole.run(), expected)
    whole.layer.expert_ids = whole.layer.expert_ids[:1].repeat(3, 1)
    expected = whole.run()
    whole.layer.rows[1] = float("nan")
    out = whole.run()
    assert torch.equal(out[[0, 2]], expected[[0, 2]]) and out[1].isnan().all()
