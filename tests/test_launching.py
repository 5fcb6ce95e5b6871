"""Which forwards are launched early: few rows of layers with experts or latent attention, outside of IF nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_kernels.early import loads_ahead
from spec_lab.core.conditional import inside_if_node
from spec_lab.models.delta_sizes import DeltaNetSizes
from spec_lab.models.expert_sizes import ExpertSizes, RouterScores
from spec_lab.models.launching import launching_of
from spec_lab.models.plan import LayerPlan, RopeConfig
from spec_lab.models.products import PLAIN
from spec_lab.models.triton_products import TritonProducts
from tests.tiny_latent import SIZES

DENSE = LayerPlan(4, 2, 16, RopeConfig(1e4, "none"), 64)
EXPERTS = replace(DENSE, experts=ExpertSizes(8, 2, 32, RouterScores.SOFTMAX))
LATENT = replace(DENSE, latent=SIZES)
DELTA = replace(DENSE, delta_net=DeltaNetSizes(2, 4, 16, 16, 4))


@pytest.mark.parametrize(
    ("plans", "num_rows", "is_early"),
    [
        ((DENSE, EXPERTS), 1, True),
        ((DENSE, EXPERTS), 16, True),
        ((LATENT,), 4, True),
        ((DENSE, EXPERTS), 17, False),
        ((DENSE, DENSE), 1, False),
        ((DELTA, EXPERTS), 1, False),
    ],
)
def test_few_rows_of_layers_whose_launches_weigh_are_early(
    plans: tuple[LayerPlan, ...], num_rows: int, is_early: bool
) -> None:
    with launching_of(TritonProducts(), plans)(num_rows):
        assert loads_ahead() == is_early
    assert not loads_ahead()


def test_neither_plain_products_nor_if_nodes_launch_early() -> None:
    with launching_of(PLAIN, (EXPERTS,))(1):
        assert not loads_ahead()
    with inside_if_node(), launching_of(TritonProducts(), (EXPERTS,))(1):
        assert not loads_ahead()
