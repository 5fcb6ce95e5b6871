"""The kernels of routed experts against those of torch, and that no bit of a row depends on the rows beside it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS
from spec_kernels.experts import routed_experts
from spec_kernels.gate import ACTIVATIONS
from spec_lab.models.experts import ExpertProduct, SortedExperts
from spec_lab.models.linear import gelu_tanh
from spec_lab.models.routers import Routing
from spec_lab.operators.triton_experts import TritonExperts
from spec_lab.operators.triton_linear import ACTIVATIONS as NAMES
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn


@dataclass
class Layer:
    """Experts, rows, and what a router chose for them."""

    gate_up: torch.Tensor
    down: torch.Tensor
    rows: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor

    def run(self, activation: str = "silu") -> torch.Tensor:
        """Run the kernels."""
        return routed_experts(self.rows, self.gate_up, self.down, self.expert_ids, self.weights, activation)

    def expected(self, activation: str = "silu") -> torch.Tensor:
        """Run the experts of torch in float32 on a CPU."""
        (function,) = (function for function, name in NAMES.items() if name == activation)
        gate_up, down, rows = (part.float().cpu() for part in (self.gate_up, self.down, self.rows))
        routing = Routing(self.expert_ids.cpu(), self.weights.cpu())
        experts = SortedExperts(ExpertProduct(gate_up), ExpertProduct(down), function)
        return experts(rows, routing).to(DEVICE, self.rows.dtype)

    def some(self, rows: list[int]) -> Layer:
        chosen = (self.rows[rows], self.expert_ids[rows], self.weights[rows])
        return Layer(self.gate_up, self.down, *chosen)


def make_layer(
    num_rows: int,
    num_experts: int = 8,
    num_chosen: int = 3,
    hidden: int = 40,
    inner: int = 24,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """No size is a multiple of a tile. Every row chooses different experts, in no order."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_rows)])
    return Layer(
        randn(num_experts, 2 * inner, hidden, seed=1).div(hidden**0.5).to(dtype),
        randn(num_experts, hidden, inner, seed=2).div(inner**0.5).to(dtype),
        randn(num_rows, hidden, dtype=dtype),
        ids.to(DEVICE),
        torch.rand(num_rows, num_chosen, generator=generator).to(DEVICE),
    )


@pytest.mark.parametrize(
    ("num_rows", "num_experts"),
    [(5, 8), *((1, 3), (2, 64), (7, 4), (17, 8))],
)
def test_equals_the_experts_of_torch(num_rows: int, num_experts: int) -> None:
    """With more experts than pairs and with fewer."""
    layer = make_layer(num_rows, num_experts)
    assert_near(layer.run(), layer.expected())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_any_dtype_and_activation_equals_the_experts_of_torch(dtype: torch.dtype, activation: str) -> None:
    layer = make_layer(5, dtype=dtype)
    assert_near(layer.run(activation), layer.expected(activation))


def test_many_pairs_of_one_expert_equal_the_experts_of_torch() -> None:
    """All rows choose expert 2, so that it has several tiles of pairs, and expert 0 has none."""
    layer = make_layer(37, num_experts=5, num_chosen=2)
    layer.expert_ids = torch.tensor([[2, 3], [4, 2]], device=DEVICE).repeat(19, 1)[:37].contiguous()
    assert_near(layer.run(), layer.expected())


def test_more_pairs_than_are_sorted_at_once_equal_the_experts_of_torch() -> None:
    layer = make_layer(600, num_experts=3, num_chosen=2, hidden=16, inner=16)
    assert_near(layer.run(), layer.expected())


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    layer = make_layer(2, num_experts=16)
    expected = layer.run()
    is_chosen = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    is_chosen[layer.expert_ids.flatten()] = True
    layer.gate_up[~is_chosen] = float("nan")
    layer.down[~is_chosen] = float("nan")
    assert torch.equal(layer.run(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    """It does not, bit for bit, for up to 16 rows: plain decoding asks for one row at a time, verify for N."""
    layer = make_layer(MAX_INVARIANT_ROWS, dtype=dtype)
    together = layer.run()
    for rows in ([0], [15], [3, 4, 5, 6], [9, 2], list(range(12))):
        assert torch.equal(layer.some(rows).run(), together[rows]), rows


def test_a_row_that_is_not_finite_stays_alone() -> None:
    """As a padded row may be: the others, which share its experts, do not show it."""
    layer = make_layer(3)
    layer.expert_ids = layer.expert_ids[:1].repeat(3, 1)
    expected = layer.run()
    layer.rows[1] = float("nan")
    out = layer.run()
    assert torch.equal(out[[0, 2]], expected[[0, 2]]) and out[1].isnan().all()


def test_few_rows_and_many_have_the_sums_of_torch() -> None:
    """Of more than 256 rows, a pair's term is rounded before it is added to others."""
    layer = make_layer(17)
    experts = TritonExperts(ExpertProduct(layer.gate_up), ExpertProduct(layer.down), gelu_tanh)
    routing = Routing(layer.expert_ids, layer.weights)
    assert torch.equal(experts(layer.rows, routing), layer.run("gelu_tanh"))
    few = layer.some([0, 1, 2, 3, 4])
    assert_near(experts(few.rows, Routing(few.expert_ids, few.weights)), few.expected("gelu_tanh"))
    many = make_layer(300, num_experts=3, num_chosen=2, hidden=16, inner=16, dtype=DTYPES[-1])
    experts = TritonExperts(ExpertProduct(many.gate_up), ExpertProduct(many.down), gelu_tanh)
    assert_near(experts(many.rows, Routing(many.expert_ids, many.weights)), many.expected("gelu_tanh"))
