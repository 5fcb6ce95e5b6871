"""The second half of a Gemma 4 layer with experts (26B-A4B): a dense MLP and routed experts in parallel.

The router and the experts each norm the residual stream themselves. The outputs of MLP and experts are normed before
they are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.plan import ExpertSizes
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.models.experts import ExpertMLP, ExpertProduct, RoutedExperts, SortedExperts
from spec_lab.models.linear import gelu_tanh, make_linear
from spec_lab.models.norms import Float32Norm
from spec_lab.models.routers import Routing, chosen_weights, highest


class Gemma4Router:
    """Weighs each chosen expert by its share among the chosen ones, times a factor of that expert.

    So the weights of a row need not sum to 1.
    """

    __slots__ = ("_eps", "_expert_scale", "_logits", "_scale", "_sizes")

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str, eps: float, sizes: ExpertSizes) -> None:
        """`prefix` ends in `router.`; `scale` there is [hidden_size], `per_expert_scale` [num_experts]."""
        self._logits = make_linear(tensors[f"{prefix}proj.weight"])
        self._scale = tensors[f"{prefix}scale"]
        self._expert_scale = tensors[f"{prefix}per_expert_scale"].float()
        self._eps = eps
        self._sizes = sizes

    def __call__(self, rows: torch.Tensor) -> Routing:
        normed = F.rms_norm(rows.float(), rows.shape[-1:], None, self._eps).to(rows.dtype)
        logits = self._logits(normed * self._scale * rows.shape[-1] ** -0.5)
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        expert_ids = highest(scores, self._sizes.num_chosen)
        weights = chosen_weights(scores, expert_ids, self._sizes)
        return Routing(expert_ids, weights * self._expert_scale[expert_ids])


@dataclass(frozen=True, slots=True)
class NormedExperts:
    """Norms rows before the experts run."""

    norm: Float32Norm
    experts: RoutedExperts

    @property
    def expert_bytes(self) -> int:
        return self.experts.expert_bytes

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.experts(self.norm(rows), routing)


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Adds the outputs of the dense MLP and the experts, each after a norm."""

    dense_norm: Float32Norm
    experts: ExpertMLP
    experts_norm: Float32Norm

    def __call__(self, stream: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.dense_norm(dense) + self.experts_norm(self.experts(stream))


def build_experts_beside(
    sizes: ExpertSizes, eps: float, tensors: Mapping[str, torch.Tensor], prefix: str, kernels: KernelSet
) -> ExpertsBeside:
    """Build the experts and the norms around them from Hugging Face names below `prefix`, which ends in a dot."""

    def norm(name: str) -> Float32Norm:
        return Float32Norm(tensors[f"{prefix}{name}.weight"], eps)

    gate_up, down = (ExpertProduct.of(tensors, f"{prefix}experts.{name}_proj") for name in ("gate_up", "down"))
    experts = ExpertMLP(
        sizes,
        Gemma4Router(tensors, f"{prefix}router.", eps, sizes),
        NormedExperts(
            norm("pre_feedforward_layernorm_2"),
            kernels.get(Op.EXPERTS, SortedExperts)(gate_up, down, gelu_tanh),
        ),
        kernels,
    )
    return ExpertsBeside(norm("post_feedforward_layernorm_1"), experts, norm("post_feedforward_layernorm_2"))
