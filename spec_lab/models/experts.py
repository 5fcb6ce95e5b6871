"""Experts instead of an MLP: a router, the products of the chosen experts, and possibly a shared expert.

All shapes are fixed and nothing synchronises with the host, so that a graph can capture a forward. Rows are sorted by
expert. A grouped product (`torch.nn.functional.grouped_mm`) multiplies each group with its expert's weights, so only
weights of chosen experts are read. docs/log/moe.md compares it with other ways on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.plan import ExpertSizes
from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.models.linear import GatedMLP, Linear, fused_linear, make_linear
from spec_lab.models.norms import RowsPart
from spec_lab.models.routers import Router, Routing, build_router

Activation = Callable[[torch.Tensor], torch.Tensor]


class RoutedExperts(Protocol):
    """Runs rows through the experts that were chosen for them."""

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert's weights."""
        ...

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs: [rows, hidden_size]."""
        ...


class RoutingObserver(Protocol):
    """Sees every choice of the routers that it watches (`spec_lab.engine.experts_read`)."""

    def saw(self, routing: Routing, num_experts: int, expert_bytes: int) -> None:
        """Record a choice among `num_experts`, each of `expert_bytes`. The experts run afterwards."""
        ...


class ExpertMLP:
    """Returns for each row [rows, hidden_size] the weighted sum of its experts, plus the shared expert if there is one.

    Attributes:
        observer: sees every choice; None if nothing is counted.
    """

    __slots__ = ("experts", "observer", "router", "shared", "sizes")

    def __init__(
        self, sizes: ExpertSizes, router: Router, experts: RoutedExperts, shared: SharedExpert | None = None
    ) -> None:
        self.sizes = sizes
        self.router = router
        self.experts = experts
        self.shared = shared
        self.observer: RoutingObserver | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        routing = self.router(rows)
        self.observe(routing)
        out = self.experts(rows, routing)
        return out if self.shared is None else out + self.shared(rows)

    def observe(self, routing: Routing) -> None:
        """Show a choice to the observer, if there is one."""
        if self.observer is not None:
            self.observer.saw(routing, self.sizes.num_experts, self.experts.expert_bytes)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every row uses. Qwen's models scale it for each row: sigmoid(gate(x)) * mlp(x).

    Attributes:
        run: `mlp`, or the kernel that replaces it if it is not scaled.
        gate: None if it is not scaled.
    """

    mlp: GatedMLP
    run: RowsPart
    gate: Linear | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.run(rows) if self.gate is None else torch.sigmoid(self.gate(rows)) * self.run(rows)


class SortedExperts:
    """Runs each chosen expert on the rows that chose it."""

    __slots__ = ("_activation", "_down", "_expert_ids", "_gate_up")

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation = F.silu) -> None:
        """`gate_up` is [experts, 2 * intermediate, hidden_size], `down` [experts, hidden_size, intermediate].

        Raises:
            UserError: the grouped product does not support the dtype on this device.
        """
        if down.is_cuda and down.dtype is not torch.bfloat16:
            raise UserError("dtype: torch runs layers of experts on a GPU in bfloat16 only; use dtype=bfloat16")
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._expert_ids = torch.arange(gate_up.shape[0], device=gate_up.device)

    @property
    def expert_bytes(self) -> int:
        return self._gate_up[0].nbytes + self._down[0].nbytes

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_chosen = routing.expert_ids.shape[1]
        by_expert, order = routing.expert_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, self._expert_ids, right=True).to(torch.int32)
        sources = torch.div(order, num_chosen, rounding_mode="floor")
        inner = self.inner(self._product(rows.index_select(0, sources), self._gate_up, ends), by_expert)
        out = self.outer(self._product(inner, self._down, ends), by_expert)
        # The terms are reordered by row before they are summed, so that a row's sum always has the same order.
        in_rows = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, (-1, num_chosen))
        return (in_rows * routing.weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)

    def inner(self, gate_up: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Return the inputs of `down` for rows [rows, 2 * intermediate] of gate and up, by the experts of the rows."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate) * up

    def outer(self, down: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Return the outputs of experts from those of `down`."""
        return down

    def _product(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


SLOPE = 1.702
"""The factor of the gate inside its sigmoid, with which x * sigmoid(x) resembles GELU."""


class ClampedExperts(SortedExperts):
    """Runs each chosen expert on the rows that chose it; an expert is down((up + 1) * gate * sigmoid(1.702 * gate)).

    Gate is at most `limit`, and up is between `-limit` and `limit`. There is no kernel for it.
    Source: openai/gpt-oss.
    """

    __slots__ = ("_down_bias", "_gate_up_bias", "_limit")

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor,
        down_bias: torch.Tensor,
        limit: float,
    ) -> None:
        """The biases are [experts, 2 * intermediate] and [experts, hidden_size]; for the weights see
        `SortedExperts`."""
        super().__init__(gate_up, down)
        self._gate_up_bias, self._down_bias, self._limit = gate_up_bias, down_bias, limit

    def inner(self, gate_up: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up + self._gate_up_bias[expert_ids]).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))

    def outer(self, down: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return down + self._down_bias[expert_ids]


def build_experts(
    sizes: ExpertSizes, tensors: Mapping[str, torch.Tensor], prefix: str, kernels: KernelSet = TORCH_FORMS
) -> ExpertMLP:
    """Build router, experts and shared expert from the names of `expert_tensor_shapes` below `prefix` (ending in
    `mlp.`)."""
    router = build_router(sizes, tensors, f"{prefix}gate.", kernels)
    gate_up, down = (f"{prefix}experts.{name}_proj" for name in ("gate_up", "down"))
    experts: RoutedExperts
    if sizes.clamp is None:
        experts = kernels.get(Op.EXPERTS, SortedExperts)(tensors[gate_up], tensors[down], F.silu)
    else:
        biases = {"gate_up_bias": tensors[f"{gate_up}_bias"], "down_bias": tensors[f"{down}_bias"]}
        experts = ClampedExperts(tensors[gate_up], tensors[down], **biases, limit=sizes.clamp)
    return ExpertMLP(sizes, router, experts, _shared_expert(sizes, tensors, prefix, kernels))


def _shared_expert(
    sizes: ExpertSizes, tensors: Mapping[str, torch.Tensor], prefix: str, kernels: KernelSet
) -> SharedExpert | None:
    if not sizes.shared_intermediate_size:
        return None
    name = f"{prefix}{sizes.shared_name}"
    gate_up = fused_linear([tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up")])
    mlp = GatedMLP(gate_up, make_linear(tensors[f"{name}.down_proj.weight"]))
    if sizes.shared_gate:
        return SharedExpert(mlp, mlp, make_linear(tensors[f"{name}_gate.weight"]))
    return SharedExpert(mlp, kernels.get(Op.SHARED_EXPERT, mlp))
