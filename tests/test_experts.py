"""Router, experts and shared expert against the blocks of transformers, and what must not follow from the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.plan import ExpertSizes, RouterScores
from spec_lab.checkpoints.tensor_shapes import expert_tensor_shapes
from spec_lab.engine.tape import TapeRecorder
from spec_lab.models.experts import ExpertMLP, build_experts
from spec_lab.models.routers import Routing, SigmoidRouter, SoftmaxRouter
from tests.onednn import needs_rows_alike
from tests.tiny_checkpoints import random_weight

HIDDEN, NUM_EXPERTS, INNER = 32, 8, 24
SIGMOID = ExpertSizes(
    num_experts=NUM_EXPERTS,
    num_chosen=3,
    intermediate_size=INNER,
    scores=RouterScores.SIGMOID,
    correction_bias=True,
    num_groups=4,
    num_chosen_groups=2,
    scaling=2.5,
    shared_intermediate_size=INNER,
)
SOFTMAX = ExpertSizes(NUM_EXPERTS, 3, INNER, RouterScores.SOFTMAX)


@dataclass(frozen=True)
class Family:
    """How transformers calls a family's block and config, and what the lab's sizes of it are."""

    package: str
    block: str
    config: str
    sizes: ExpertSizes
    options: Mapping[str, Any]


DEEPSEEK_OPTIONS = {
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
}
QWEN_OPTIONS = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 3}
SHARED = replace(SOFTMAX, shared_intermediate_size=16, shared_name="shared_expert", shared_gate=True)
FAMILIES = {
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", SIGMOID, DEEPSEEK_OPTIONS),
    "glm4_moe": Family("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", SIGMOID, DEEPSEEK_OPTIONS),
    "glm4_moe_no_groups_two_shared": Family(
        "glm4_moe",
        "Glm4MoeMoE",
        "Glm4MoeConfig",
        replace(SIGMOID, num_groups=1, num_chosen_groups=1, renormalized=False, shared_intermediate_size=2 * INNER),
        DEEPSEEK_OPTIONS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "qwen3_moe": Family(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", SOFTMAX, QWEN_OPTIONS | {"norm_topk_prob": True}
    ),
    "qwen3_moe_not_renormalized": Family(
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        replace(SOFTMAX, renormalized=False),
        QWEN_OPTIONS | {"norm_topk_prob": False},
    ),
    "qwen3_5_moe": Family(
        "qwen3_5_moe",
        "Qwen3_5MoeSparseMoeBlock",
        "Qwen3_5MoeTextConfig",
        SHARED,
        QWEN_OPTIONS | {"shared_expert_intermediate_size": 16},
    ),
}


@dataclass
class Block:
    """A block of transformers with random parameters and buffers, and its tensors under their names in the lab."""

    module: Any
    tensors: dict[str, torch.Tensor]

    @torch.inference_mode()
    def expected(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.module(rows.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).squeeze(0)


def make_block(name: str, seed: int = 0) -> Block:
    import importlib

    family = FAMILIES[name]
    package = importlib.import_module(f"transformers.models.{family.package}.modeling_{family.package}")
    config_class = getattr(package, family.config)
    config = config_class(hidden_size=HIDDEN, moe_intermediate_size=INNER, **family.options)
    config._experts_implementation = "eager"
    module = getattr(package, family.block)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in sorted(module.named_parameters()):
            parameter.copy_(random_weight(key, tuple(parameter.shape), generator) / 2)
        for _, buffer in sorted(module.named_buffers()):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator) - 1.0)
    return Block(module, {f"mlp.{key}": value for key, value in module.state_dict().items()})


def random_rows(count: int, seed: int = 1) -> torch.Tensor:
    return 2 * torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def build(name: str, block: Block, **changes: Any) -> ExpertMLP:
    """The lab's part with the block's tensors; `changes` are of its sizes."""
    return build_experts(replace(FAMILIES[name].sizes, **changes), block.tensors, "mlp.")


@torch.inference_mode()
def distance(part: ExpertMLP, block: Block, count: int = 33) -> float:
    rows = random_rows(count)
    return float((part(rows) - block.expected(rows)).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_equal_transformers_block(name: str) -> None:
    """The biased scores are negative for the most part, so that a dropped group with 0 in place of -inf would win."""
    block = make_block(name)
    assert {key.removeprefix("mlp."): value.shape for key, value in block.tensors.items()} == {
        key: torch.Size(shape) for key, shape in expert_tensor_shapes(FAMILIES[name].sizes, HIDDEN).items()
    }
    part = build(name, block)
    assert max(distance(part, block, count) for count in (1, 2, 33)) < 1e-5


@torch.inference_mode()
def test_of_equal_scores_the_lower_expert_wins_whatever_stands_beside() -> None:
    """`torch.topk` chooses others among equals for one row than for many."""
    sizes = ExpertSizes(64, 4, INNER, RouterScores.SOFTMAX)
    weight = torch.zeros(64, HIDDEN)
    weight[17] = 1.0
    rows = random_rows(40).abs()
    sigmoid = SigmoidRouter(weight, None, replace(sizes, scores=RouterScores.SIGMOID))
    for router in (SoftmaxRouter(weight, sizes), sigmoid):
        for count in (1, 3, 40):
            assert router(rows[:count]).expert_ids.tolist() == [[17, 0, 1, 2]] * count
    grouped = replace(sizes, scores=RouterScores.SIGMOID, num_groups=8, num_chosen_groups=2)
    chosen = SigmoidRouter(torch.zeros(64, HIDDEN), None, grouped)(rows).expert_ids
    assert chosen.tolist() == [[0, 1, 2, 3]] * 40


@needs_rows_alike
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe"])
@torch.inference_mode()
def test_a_rows_routing_is_bit_equal_whatever_stands_beside(name: str) -> None:
    """The experts' products round by how many rows chose an expert, as attention does by query rows."""
    part, rows = build(name, make_block(name)), random_rows(9)
    together, outputs = part.router(rows), part(rows)
    for count in (1, 2, 5):
        alone = part.router(rows[:count])
        assert torch.equal(alone.expert_ids, together.expert_ids[:count])
        assert torch.equal(alone.weights, together.weights[:count])
        torch.testing.assert_close(part(rows[:count]), outputs[:count], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_an_expert_that_overflows_spoils_only_the_rows_that_chose_it() -> None:
    block = make_block("qwen3_moe")
    block.tensors["mlp.experts.gate_up_proj"][2] = float("nan")
    part = build("qwen3_moe", block)
    rows = random_rows(20)
    chose = (part.router(rows).expert_ids == 2).any(dim=1)
    assert chose.any() and not chose.all()
    assert torch.equal(part(rows).isfinite().all(dim=1), ~chose)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5_moe"])
def test_a_graph_holds_the_experts_and_chooses_anew_at_each_replay(name: str) -> None:
    """No host read and no shape that follows from values: the recorder refuses both."""
    block = make_block(name)
    part = build(name, block)
    rows = random_rows(5)
    graph = TapeRecorder().capture(lambda: part(rows))
    with torch.inference_mode():
        for seed in (7, 8):
            rows.copy_(random_rows(5, seed))
            graph.replay()
            torch.testing.assert_close(graph.outputs, block.expected(rows), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_bfloat16_outputs_are_weighed_and_added_up_in_float32() -> None:
    block = make_block("glm4_moe")
    rounded = Block(block.module, {key: value.bfloat16() for key, value in block.tensors.items()})
    experts, row = build("glm4_moe", rounded).experts, random_rows(1).bfloat16()
    ids, weights = torch.tensor([[5, 0, 3]]), torch.tensor([[1.7, -1.3, 0.21]])
    alone = [experts(row, Routing(ids[:, i : i + 1], torch.ones(1, 1))) for i in range(3)]
    expected = sum(weight * out.float() for weight, out in zip(weights[0], alone, strict=True))
    together = experts(row, Routing(ids, weights))
    assert together.dtype == torch.bfloat16
    assert torch.equal(together, expected.bfloat16())
