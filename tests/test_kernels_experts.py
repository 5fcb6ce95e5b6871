"""The kernels of routed experts, for few rows and for any number, against those of torch, and that no bit of a row
depends on the rows beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS
from spec_kernels.experts import routed_experts
from spec_kernels.few_experts import few_experts, num_experts_arrivals
from spec_kernels.gate import ACTIVATIONS
from spec_lab.models.experts import ExpertProduct, SortedExperts
from spec_lab.models.linear import GatedMLP, gelu_tanh, make_linear
from spec_lab.models.routers import Routing
from spec_lab.operators.triton_experts import TritonExperts
from spec_lab.operators.triton_linear import ACTIVATIONS as NAMES
from tests.covering import each_value
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

KERNELS = ("few", "routed")


@dataclass
class Layer:
    """Experts, rows, what a router chose for them, and what may be added: a shared expert and a residual."""

    gate_up: torch.Tensor
    down: torch.Tensor
    rows: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    shared: tuple[torch.Tensor, torch.Tensor] | None
    residual: torch.Tensor | None

    def run(self, activation: str = "silu") -> torch.Tensor:
        """Run the kernel for few rows if there is a shared expert, else the others."""
        given = self.rows, self.gate_up, self.down, self.expert_ids, self.weights
        return routed_experts(*given, activation, self.residual) if self.shared is None else self.run_few(activation)

    def run_few(self, activation: str = "silu") -> torch.Tensor:
        """Run the kernel for few rows twice: the second time its counters have been used."""
        given = self.rows, self.gate_up, self.down, self.expert_ids, self.weights, *(self.shared or (None, None))
        num_counters = num_experts_arrivals(self.rows.shape[1], len(self.down))
        arrivals = torch.zeros(num_counters, dtype=torch.int32, device=DEVICE)
        for _ in range(2):
            out = few_experts(*given, self.residual, arrivals, activation)
            assert not arrivals.any()
        return out

    def expected(self, activation: str = "silu") -> torch.Tensor:
        """Run torch's parts in float32 on a CPU, whose sum is rounded once."""
        (function,) = (function for function, name in NAMES.items() if name == activation)
        gate_up, down, rows = (part.float().cpu() for part in (self.gate_up, self.down, self.rows))
        experts = SortedExperts(ExpertProduct(gate_up), ExpertProduct(down), function)
        total = experts(rows, Routing(self.expert_ids.cpu(), self.weights.cpu()))
        if self.shared is not None:
            total += GatedMLP(*(make_linear(weight.float().cpu()) for weight in self.shared), function)(rows)
        total = total if self.residual is None else total + self.residual.float().cpu()
        return total.to(DEVICE, self.rows.dtype)

    def some(self, rows: list[int]) -> Layer:
        chosen = self.rows[rows], self.expert_ids[rows], self.weights[rows], self.shared
        return Layer(self.gate_up, self.down, *chosen, None if self.residual is None else self.residual[rows])


def make_layer(
    kernel: str,
    num_rows: int,
    num_experts: int = 8,
    num_chosen: int = 3,
    hidden: int = 40,
    inner: int = 24,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """No size is a multiple of a tile. Every row chooses different experts, in no order. The residual's rows lie
    apart."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_rows)])
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner), (2 * inner, hidden), (hidden, inner)
    weights = [randn(*shape, seed=seed).div(shape[-1] ** 0.5).to(dtype) for seed, shape in enumerate(shapes, 1)]
    return Layer(
        *weights[:2],
        randn(num_rows, hidden, dtype=dtype),
        ids.to(DEVICE),
        torch.rand(num_rows, num_chosen, generator=generator).to(DEVICE),
        (weights[2], weights[3]) if kernel == "few" else None,
        randn(num_rows, hidden + 20, seed=9, dtype=dtype)[:, :hidden],
    )


SIZES = {
    **{("routed", size): size for size in ((5, 8, 3), (1, 3, 3), (2, 64, 3), (7, 4, 3), (17, 8, 3))},
    **{("few", size): size for size in ((5, 8, 3), (1, 3, 3), (2, 64, 8), (16, 4, 1))},
}


@pytest.mark.parametrize(("case", "dtype", "activation"), each_value(SIZES, DTYPES, ACTIVATIONS))
def test_equals_the_experts_of_torch(
    case: tuple[str, tuple[int, int, int]], dtype: torch.dtype, activation: str
) -> None:
    """With more experts than pairs and with fewer."""
    layer = make_layer(case[0], *case[1], dtype=dtype)
    assert_near(layer.run(activation), layer.expected(activation))


def test_without_a_shared_expert_and_without_a_residual() -> None:
    layer = make_layer("few", 4)
    for part in (replace(layer, shared=None), replace(layer, residual=None)):
        assert_near(part.run_few(), part.expected())


def test_many_pairs_of_one_expert_equal_the_experts_of_torch() -> None:
    """All rows choose expert 2, so that it has several tiles of pairs, and expert 0 has none."""
    layer = make_layer("routed", 37, num_experts=5, num_chosen=2)
    layer.expert_ids = torch.tensor([[2, 3], [4, 2]], device=DEVICE).repeat(19, 1)[:37].contiguous()
    assert_near(layer.run(), layer.expected())


def test_more_pairs_than_are_sorted_at_once_equal_the_experts_of_torch() -> None:
    layer = make_layer("routed", 600, num_experts=3, num_chosen=2, hidden=16, inner=16)
    assert_near(layer.run(), layer.expected())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernel: str, dtype: torch.dtype) -> None:
    """It does not, bit for bit, for up to 16 rows: plain decoding asks for one row at a time, verify for N."""
    layer = make_layer(kernel, MAX_INVARIANT_ROWS, dtype=dtype)
    together = layer.run()
    for rows in ([15], [3, 4, 5, 6], [9, 2]):
        assert torch.equal(layer.some(rows).run(), together[rows]), rows


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_nobody_chose_is_not_read_and_a_row_that_is_not_finite_stays_alone(kernel: str) -> None:
    """As a padded row may be: the others, which share its experts, do not show it."""
    layer = make_layer(kernel, 3, num_experts=16)
    expected = layer.run()
    is_chosen = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    is_chosen[layer.expert_ids.flatten()] = True
    layer.gate_up[~is_chosen] = float("nan")
    layer.down[~is_chosen] = float("nan")
    assert torch.equal(layer.run(), expected)
    layer.expert_ids = layer.expert_ids[:1].repeat(3, 1)
    expected = layer.run()
    layer.rows[1] = float("nan")
    out = layer.run()
    assert torch.equal(out[[0, 2]], expected[[0, 2]]) and out[1].isnan().all()


@pytest.mark.parametrize(("num_rows", "dtype"), [(5, DTYPES[0]), (17, DTYPES[0]), (300, DTYPES[-1])])
def test_few_rows_and_many_have_the_sums_of_torch(num_rows: int, dtype: torch.dtype) -> None:
    """Of more than 256 rows, a pair's term is rounded before it is added to others."""
    layer = replace(make_layer("routed", num_rows, 3, 2, 16, 16, dtype), residual=None)
    experts = TritonExperts(ExpertProduct(layer.gate_up), ExpertProduct(layer.down), gelu_tanh)
    assert_near(experts(layer.rows, Routing(layer.expert_ids, layer.weights)), layer.expected("gelu_tanh"))
