"""Experts instead of an MLP: a router, the products of the chosen experts, and possibly a shared expert.

All shapes are fixed and nothing synchronises with the host, so that a graph can capture a forward. Rows are sorted by
expert. A grouped product (`torch.nn.functional.grouped_mm`) multiplies each group with its expert's weights, so only
weights of chosen experts are read. docs/log/moe.md compares it with other ways on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_kernels.four_bits_reference import packed_codes, packed_scales, widen_reference
from spec_lab.checkpoints.keep_narrow import SCALES, SCALES_SUFFIX
from spec_lab.checkpoints.plan import ExpertSizes
from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.models.linear import Activation, Dequantise, GatedMLP, Linear, fused_linear, make_linear
from spec_lab.models.norms import RowsPart
from spec_lab.models.routers import Router, Routing, build_router


class RoutedExperts(Protocol):
    """Runs rows through the experts that were chosen for them."""

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert's weights."""
        ...

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs: [rows, hidden_size]."""
        ...


class ExpertMLP:
    """Returns for each row [rows, hidden_size] the weighted sum of its experts, plus the shared expert if there is one.

    Attributes:
        saw: is shown every choice before the experts run (`KernelSet.watch_experts`).
    """

    __slots__ = ("experts", "router", "saw", "shared", "sizes")

    def __init__(
        self,
        sizes: ExpertSizes,
        router: Router,
        experts: RoutedExperts,
        kernels: KernelSet,
        *,
        shared: SharedExpert | None = None,
    ) -> None:
        self.sizes = sizes
        self.router = router
        self.experts = experts
        self.shared = shared
        self.saw = kernels.watch_experts(sizes.num_experts, experts.expert_bytes)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        routing = self.router(rows)
        self.saw(routing.expert_ids)
        out = self.experts(rows, routing)
        return out if self.shared is None else out + self.shared(rows)


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


class ExpertProduct:
    """One product of all experts of a layer.

    Attributes:
        weight: [experts, out_features, in_features]; of a narrow weight the packed codes [experts, out_features, 32 *
            blocks of inputs].
        scales: of a narrow weight, [experts * out_features, ...] as in `four_bits_reference`; None for others.
        bias: [experts, out_features] or None.
        shape: that of `weight` if it were not narrow.
    """

    __slots__ = ("bias", "scales", "shape", "weight")

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> None:
        """Take weights [experts, out_features, in_features], or codes of 4 bits with scales [experts, out_features,
        ...]."""
        self.shape: tuple[int, int, int] = (weight.shape[0], weight.shape[1], weight.shape[2])
        self.bias = bias
        self.weight, self.scales = weight, scales
        if scales is not None:
            self.weight = torch.stack([packed_codes(codes) for codes in weight])  # one by one, for memory's sake
            self.scales = packed_scales(scales.flatten(0, 1))

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], name: str) -> ExpertProduct:
        """Make the product whose weight has this name."""
        return cls(tensors[name], tensors.get(f"{name}{SCALES_SUFFIX}"), tensors.get(f"{name}_bias"))

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert's weight, with its scales."""
        return sum(part.nbytes for part in (self.weight, self.scales) if part is not None) // self.shape[0]

    def widened_by(self, dequantise: Dequantise, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights in their whole shape; `dequantise` widens a narrow weight to `dtype`."""
        if self.scales is None:
            return self.weight
        wide = torch.empty(self.shape, dtype=dtype, device=self.weight.device)
        dequantise(wide.flatten(0, 1), self.weight.flatten(0, 1), self.scales)
        return wide


SLOPE = 1.702
"""The factor of the gate inside its sigmoid, with which x * sigmoid(x) resembles GELU."""


class SortedExperts:
    """Runs each chosen expert on the rows that chose it: down(activation(gate) * up).

    With a `limit` (gpt-oss) an expert is down((up + 1) * gate * sigmoid(1.702 * gate)) instead. Gate is at most
    `limit`, and up is between `-limit` and `limit`. Source: openai/gpt-oss.
    """

    __slots__ = ("_activation", "_down", "_expert_ids", "_gate_up", "_limit")

    def __init__(
        self,
        gate_up: ExpertProduct,
        down: ExpertProduct,
        activation: Activation = F.silu,
        limit: float | None = None,
    ) -> None:
        """`gate_up` has 2 * intermediate outputs, gates first.

        Raises:
            UserError: the grouped product does not support the dtype on this device.
        """
        if down.scales is None and down.weight.is_cuda and down.weight.dtype is not torch.bfloat16:
            raise UserError("dtype: torch runs layers of experts on a GPU in bfloat16 only; use dtype=bfloat16")
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._limit = limit
        self._expert_ids = torch.arange(gate_up.shape[0], device=gate_up.weight.device)

    @property
    def expert_bytes(self) -> int:
        return self._gate_up.expert_bytes + self._down.expert_bytes

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_chosen = routing.expert_ids.shape[1]
        by_expert, order = routing.expert_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, self._expert_ids, right=True).to(torch.int32)
        sources = torch.div(order, num_chosen, rounding_mode="floor")
        inner = self._inner(_grouped(rows.index_select(0, sources), self._gate_up, ends, by_expert))
        out = _grouped(inner, self._down, ends, by_expert)
        # The terms are reordered by row before they are summed, so that a row's sum always has the same order.
        in_rows = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, (-1, num_chosen))
        return (in_rows * routing.weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)

    def _inner(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the inputs of `down` for rows [rows, 2 * intermediate] of gate and up."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self._limit is None:
            return self._activation(gate) * up
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))


def _grouped(rows: torch.Tensor, product: ExpertProduct, ends: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts; an expert's rows end at its `ends`."""
    weights = product.widened_by(widen_reference, rows.dtype)
    out = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return out if product.bias is None else out + product.bias[expert_ids]


def build_experts(
    sizes: ExpertSizes, tensors: Mapping[str, torch.Tensor], prefix: str, kernels: KernelSet = TORCH_FORMS
) -> ExpertMLP:
    """Build router, experts and shared expert from the names of `expert_tensor_shapes` below `prefix` (ending in
    `mlp.`)."""
    router = build_router(sizes, tensors, f"{prefix}gate.", kernels)
    gate_up, down = (ExpertProduct.of(tensors, f"{prefix}experts.{name}_proj") for name in ("gate_up", "down"))
    experts: RoutedExperts = kernels.get(Op.EXPERTS, SortedExperts)(gate_up, down, F.silu, sizes.clamp)
    return ExpertMLP(sizes, router, experts, kernels, shared=_shared_expert(sizes, tensors, prefix, kernels))


def _shared_expert(
    sizes: ExpertSizes, tensors: Mapping[str, torch.Tensor], prefix: str, kernels: KernelSet
) -> SharedExpert | None:
    if not sizes.shared_intermediate_size:
        return None
    name = f"{prefix}{sizes.shared_name}"
    is_narrow = f"{name}.down_proj.{SCALES}" in tensors

    def product(*parts: str) -> Linear:
        weights = [tensors[f"{name}.{part}_proj.weight"] for part in parts]
        return fused_linear(weights, None, [tensors[f"{name}.{part}_proj.{SCALES}"] for part in parts if is_narrow])

    mlp = GatedMLP(product("gate", "up"), product("down"))
    if sizes.shared_gate:
        return SharedExpert(mlp, mlp, make_linear(tensors[f"{name}_gate.weight"]))
    return SharedExpert(mlp, kernels.get(Op.SHARED_EXPERT, mlp))
