"""The kernels of a router against the routers of torch, and that a row looks at itself alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_kernels.routing import can_choose, choose_experts, route
from spec_lab.checkpoints.plan import ExpertSizes, RouterScores
from spec_lab.models.norms import RMSNorm
from spec_lab.models.routers import Routing, SigmoidRouter, SoftmaxRouter, torch_router
from spec_lab.operators.triton_experts import TritonRouter, triton_router
from tests.covering import each_value
from tests.kernel_lab import DEVICE, DTYPES, randn

SOFTMAX = ExpertSizes(13, 3, 24, RouterScores.SOFTMAX)
GROUPS = ExpertSizes(
    16, 3, 24, RouterScores.SIGMOID, correction_bias=True, num_groups=4, num_chosen_groups=2, scaling=2.5
)
KINDS = {
    "softmax": SOFTMAX,
    "softmax_not_renormalized": replace(SOFTMAX, renormalized=False),
    "sigmoid": replace(SOFTMAX, scores=RouterScores.SIGMOID, num_chosen=8),
    "groups": GROUPS,
}


def choose(logits: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> Routing:
    groups = sizes.num_chosen, sizes.num_groups, sizes.num_chosen_groups
    return Routing(*choose_experts(logits, bias, *groups, str(sizes.scores), sizes.renormalized, sizes.scaling))


def assert_alike(got: Routing, expected: Routing) -> None:
    assert torch.equal(got.expert_ids, expected.expert_ids)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_equals_that_of_torch(kind: str) -> None:
    """Biased scores are negative, so that a dropped group with 0 in place of -inf would win; some scores are equal."""
    sizes = KINDS[kind]
    logits = randn(6, sizes.num_experts)
    logits[3:, 5] = logits[3:, 2]
    logits[5] = 0.5
    bias = 0.3 * randn(sizes.num_experts, seed=1) - 2 if sizes.correction_bias else None
    identity = torch.eye(sizes.num_experts, device=DEVICE)
    assert_alike(choose(logits, bias, sizes), torch_router(identity, bias, sizes)(logits))


@pytest.mark.parametrize(("kind", "dtype"), each_value(["softmax", "groups"], DTYPES))
def test_the_router_equals_that_of_torch(kind: str, dtype: torch.dtype) -> None:
    """With few rows, whose logits have a kernel, and with many."""
    sizes = KINDS[kind]
    weight = randn(sizes.num_experts, 40, dtype=dtype)
    bias = randn(sizes.num_experts, seed=1) if sizes.correction_bias else None
    expected_router = torch_router(weight, bias, sizes)
    assert isinstance(expected_router, SigmoidRouter if sizes.correction_bias else SoftmaxRouter)
    router = triton_router(weight, bias, sizes)
    assert isinstance(router, TritonRouter)
    for count in (5, 70):
        rows = randn(count, 40, seed=2, dtype=dtype)
        assert_alike(router(rows), expected_router(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    router = TritonRouter(randn(16, 3000, dtype=dtype), randn(16, seed=1), GROUPS)
    rows = randn(20, 3000, seed=2, dtype=dtype)
    together = router(rows)
    for first, last in ((0, 1), (15, 16), (3, 7)):
        alone = router(rows[first:last])
        assert torch.equal(alone.expert_ids, together.expert_ids[first:last])
        assert torch.equal(alone.weights, together.weights[first:last])


@pytest.mark.parametrize("kind", ["softmax", "groups"])
def test_a_route_with_its_norm_equals_that_of_torch(kind: str) -> None:
    """Of strided rows; twice, since the counters have to be zero again."""
    sizes = KINDS[kind]
    rows, gate, norm = 3 * randn(4, 60)[:, 10:50], randn(sizes.num_experts, 40, seed=1), 1 + randn(40, seed=2)
    bias = randn(sizes.num_experts, seed=3) if sizes.correction_bias else None
    arrivals = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    groups = sizes.num_chosen, sizes.num_groups, sizes.num_chosen_groups
    options = *groups, str(sizes.scores), sizes.renormalized, sizes.scaling
    expected = RMSNorm(norm, 1e-5)(rows)
    for _ in range(2):
        *routing, normed = route(rows, norm, 1e-5, gate, bias, arrivals, *options)
        assert_alike(Routing(*routing), torch_router(gate, bias, sizes)(expected))
        assert not arrivals.any()
        torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_not_finite_chooses_experts_that_exist() -> None:
    for sizes in (SOFTMAX, GROUPS):
        logits = randn(3, sizes.num_experts)
        expected = choose(logits, None, sizes).expert_ids
        logits[1] = float("nan")
        ids = choose(logits, None, sizes).expert_ids
        assert torch.equal(ids[[0, 2]], expected[[0, 2]]) and ((ids >= 0) & (ids < sizes.num_experts)).all()


def test_groups_that_are_no_powers_of_two_keep_torch() -> None:
    assert can_choose(256, 8, 4) and can_choose(12, 1, 1) and not can_choose(24, 4, 2) and not can_choose(8, 8, 4)
    sizes = replace(GROUPS, num_experts=24)
    assert isinstance(triton_router(randn(24, 8), None, sizes), SigmoidRouter)
