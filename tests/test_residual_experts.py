"""The second half of a layer with experts, in two or three launches, against norm, experts and sums one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.keep_narrow import INT4, NarrowForm, with_narrow_products
from spec_lab.checkpoints.plan import ExpertSizes, RouterScores
from spec_lab.checkpoints.tensor_shapes import expert_tensor_shapes
from spec_lab.engine.experts_read import ExpertsRead, ReadingStage
from spec_lab.models.experts import build_experts
from spec_lab.models.norms import RMSNorm
from spec_lab.operators.triton_experts import AddExperts, ResidualExperts
from spec_lab.operators.triton_set import triton_set
from tests.kernel_lab import DEVICE, randn
from tests.test_triton_products import DTYPE, assert_alike

HIDDEN = 32
SIZES = ExpertSizes(8, 3, 16, RouterScores.SIGMOID, correction_bias=True, shared_intermediate_size=16)


@pytest.mark.parametrize(
    ("changes", "num_rows", "form"),
    [({}, 12, None), ({"shared_intermediate_size": 48}, 5, None), ({"shared_gate": True}, 12, None), ({}, 12, INT4)],
    ids=["one_more", "wider", "gated", "narrow"],
)
def test_it_gives_what_its_parts_give(changes: dict[str, Any], num_rows: int, form: NarrowForm | None) -> None:
    """Of few rows and of many; experts that were read are counted in both."""
    sizes = replace(SIZES, **changes)
    tensors = {
        name: randn(*shape, seed=seed, dtype=DTYPE) / shape[-1] ** 0.5
        for seed, (name, shape) in enumerate(expert_tensor_shapes(sizes, HIDDEN).items())
    }
    kept = tensors if form is None else with_narrow_products(tensors, form)
    norm = RMSNorm(1 + randn(HIDDEN, seed=20, dtype=DTYPE), 1e-5)
    stream = 3 * randn(num_rows, HIDDEN, seed=21, dtype=DTYPE)
    reads = []
    for run in (
        lambda mlp, rows: ResidualExperts(mlp, norm)(rows, rows),
        lambda mlp, rows: AddExperts(mlp)(rows, norm(rows)),
        lambda mlp, rows: rows + mlp(norm(rows)),
    ):
        counts = ExpertsRead(DEVICE)
        kernels = replace(triton_set().without_parts(), watch_experts=counts.watch)
        mlp = build_experts(sizes, kept, "", kernels)
        counts.begin_round(torch.ones(1, dtype=torch.bool, device=DEVICE))
        with counts.stage(ReadingStage.VERIFY):
            reads.append((run(mlp, stream), counts))
    for out, counts in reads[:2]:
        assert_alike(out, reads[2][0])
        assert counts.read() == reads[2][1].read() != ExpertsRead(DEVICE).read()
