"""Which forwards are launched early: few rows of small layers, and of layers with experts or latent attention."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_kernels.early import loads_ahead
from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.checkpoints.expert_sizes import ExpertSizes, RouterScores
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.latent_sizes import LatentSizes
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.random_weights import random_mtp
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.passes import Pass
from spec_lab.models.launching import launching_of
from spec_lab.models.linear import make_linear
from spec_lab.models.mtp import MtpModule
from spec_lab.models.rope import rotary_table
from spec_lab.operators.triton_set import triton_set
from tests.kernel_lab import DEVICE, randn
from tests.test_triton_products import DTYPE, FEATURES, MAX_POSITIONS, Lane, make_target, prompt
from tests.tiny_latent import SIZES

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


@torch.inference_mode()
def test_targets_and_their_modules_are_launched_so(tmp_path: Path) -> None:
    sizes = SIZES | {"model_type": "deepseek_v3", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config, early_forwards = read_model_config(tmp_path), []

    def watched() -> AbstractContextManager[None]:
        early_forwards.append(1)
        return nullcontext()

    kernels = KernelSet({Op.EARLY_LAUNCHES: watched}, invariant_rows=16)
    lane = Lane.of(config.layers)
    lane.cache.kv.zero_()
    target = make_target(config, lane, kernels)
    for num_rows, num_early in ((4, 1), (17, 1)):
        metadata = lane.metadata([0], num_rows)
        target.forward(prompt(1, num_rows).flatten(), Pass(lane.cache, metadata), FEATURES)
        assert len(early_forwards) == num_early
    mtp, (tensors,) = random_mtp(config, 1, DTYPE, DEVICE, 1)
    plan = mtp.layer.only_layer
    rotary = rotary_table(plan.rope, plan.head_dim, MAX_POSITIONS, DTYPE, DEVICE)
    lane = Lane.of((plan,))
    lane.cache.kv.zero_()
    module = MtpModule(mtp, tensors, target.embedding, make_linear(target.head_weight), rotary, lane.backend, kernels)
    hidden = randn(4, target.embedding.shape[1], dtype=DTYPE)
    module.forward(prompt(1, 4).flatten(), hidden, Pass(lane.cache.layers[0], lane.metadata([0], 4)))
    assert len(early_forwards) == 2
