"""Sizes and options of a layer's experts (mixture of experts), and the tensors that follow from them; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class RouterScores(StrEnum):
    """The function that turns a router's logits into scores."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of one layer: a router sends each row through some of them, and through the shared one, if any.

    Attributes:
        num_experts: number of experts that the router chooses among.
        num_chosen: number of experts that it chooses for a row.
        intermediate_size: intermediate size of one expert.
        scores: function of the router's logits, applied over all experts before any is chosen.
        correction_bias: whether a bias is added to the scores, for the choice only (DeepSeek-V3).
        num_groups: number of equal groups of consecutive experts. A row may use `num_chosen_groups` of them: those
            whose two best experts have the highest sum of scores, with the bias if there is one.
        renormalized: whether the weights of a row's experts are divided by their sum.
        scaling: the factor that these weights are then multiplied by.
        shared_intermediate_size: width of the shared MLP that every row also goes through; 0 is none.
        shared_name: the family's name for the shared expert.
        clamp: the largest gate and up of experts whose products have biases, and whose router has one too (gpt-oss);
            None for other experts.
        shared_gate: whether its output is multiplied by the sigmoid of one more product (Qwen3-Next, Qwen3.5).
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    scores: RouterScores
    correction_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    renormalized: bool = True
    scaling: float = 1.0
    shared_intermediate_size: int = 0
    shared_name: Literal["shared_experts", "shared_expert"] = "shared_experts"
    shared_gate: bool = False
    clamp: float | None = None


def routed_tensor_shapes(sizes: ExpertSizes, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the routed experts' tensors, each with all experts."""
    inner = sizes.intermediate_size
    return {
        "experts.gate_up_proj": (sizes.num_experts, 2 * inner, hidden_size),
        "experts.down_proj": (sizes.num_experts, hidden_size, inner),
    }


def expert_tensor_shapes(sizes: ExpertSizes, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that replace an MLP's: router, experts, shared expert."""
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (sizes.num_experts, hidden_size)}
    if sizes.correction_bias:
        shapes["gate.e_score_correction_bias"] = (sizes.num_experts,)
    shapes |= routed_tensor_shapes(sizes, hidden_size)
    if sizes.clamp is not None:
        shapes["gate.bias"] = (sizes.num_experts,)
        shapes |= {f"{name}_bias": shapes[name][:2] for name in ("experts.gate_up_proj", "experts.down_proj")}
    inner = sizes.shared_intermediate_size
    if inner:
        shapes[f"{sizes.shared_name}.gate_proj.weight"] = (inner, hidden_size)
        shapes[f"{sizes.shared_name}.up_proj.weight"] = (inner, hidden_size)
        shapes[f"{sizes.shared_name}.down_proj.weight"] = (hidden_size, inner)
    if sizes.shared_gate:
        shapes[f"{sizes.shared_name}_gate.weight"] = (1, hidden_size)
    return shapes
