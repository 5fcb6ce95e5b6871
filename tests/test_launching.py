"""Which forwards are launched early: few rows of small layers, and of layers with experts or latent attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_kernels.early import loads_ahead
from spec_lab.checkpoints.plan import DeltaNetSizes, ExpertSizes, LatentSizes, LayerPlan, RopeConfig, RouterScores
from spec_lab.core.kernel_set import TORCH_FORMS
from spec_lab.models.launching import launching_of
from spec_lab.operators.triton_set import triton_set

DENSE = LayerPlan(4, 2, 16, RopeConfig(1e4, "none"), 64)
LARGE = replace(DENSE, intermediate_size=14336)
EXPERTS = replace(DENSE, experts=ExpertSizes(8, 2, 32, RouterScores.SOFTMAX))
LATENT = replace(DENSE, latent=LatentSizes(None, 16, 8, 8, 8))
DELTA = replace(DENSE, delta_net=DeltaNetSizes(2, 4, 16, 16, 4))


@pytest.mark.parametrize(
    ("plans", "num_rows", "is_early"),
    [
        ((DENSE, EXPERTS), 1, True),
        ((DENSE, EXPERTS), 16, True),
        ((LATENT,), 4, True),
        ((DENSE, EXPERTS), 17, False),
        ((DENSE, DENSE), 1, True),
        ((DENSE, DENSE), 17, False),
        ((DENSE, LARGE), 1, False),
        ((DELTA, EXPERTS), 1, False),
    ],
)
def test_few_rows_of_layers_whose_launches_weigh_are_early(
    plans: tuple[LayerPlan, ...], num_rows: int, is_early: bool
) -> None:
    with launching_of(triton_set(), plans)(num_rows):
        assert loads_ahead() == is_early
    assert not loads_ahead()


def test_neither_plain_nor_the_librarys_products_launch_early() -> None:
    with launching_of(TORCH_FORMS, (EXPERTS,))(1):
        assert not loads_ahead()
    with launching_of(triton_set(row_invariant=False), (EXPERTS,))(1):
        assert not loads_ahead()
