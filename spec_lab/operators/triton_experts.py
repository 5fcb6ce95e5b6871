"""Routers and experts through the kernels of `spec_kernels`: kernels=triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS, MOST_NARROW_PAIRS
from spec_kernels.experts import routed_experts
from spec_kernels.few_experts import few_experts, num_experts_arrivals
from spec_kernels.gated_share import add_gated_share
from spec_kernels.routing import MAX_ROUTED_ROWS, can_choose, choose_experts, route
from spec_kernels.widen import widen
from spec_lab.checkpoints.plan import ExpertSizes
from spec_lab.core.errors import UserError
from spec_lab.models.experts import ExpertMLP, ExpertProduct, SharedExpert
from spec_lab.models.linear import Activation, Linear
from spec_lab.models.norms import WeightedNorm
from spec_lab.models.routers import Router, Routing, float32_product, torch_router
from spec_lab.operators.triton_linear import ACTIVATIONS, SkinnyMLP, dense


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The weights of an expert that every row goes through, which has the size of the routed ones.

    Attributes:
        gate_up: [2 * intermediate_size, hidden_size].
        down: [hidden_size, intermediate_size].
    """

    gate_up: torch.Tensor
    down: torch.Tensor


class TritonExperts:
    """Routed experts in Triton. With up to 16 rows, a row's result does not depend on the other rows."""

    __slots__ = ("_activation", "_arrivals", "_down", "_gate_up", "_limit")

    def __init__(
        self, gate_up: ExpertProduct, down: ExpertProduct, activation: Activation, limit: float | None = None
    ) -> None:
        """The arguments are those of `SortedExperts`.

        Raises:
            UserError: the kernels do not have this activation, or the GPU's TMA cannot load rows of this size.
        """
        if activation not in ACTIVATIONS:
            raise UserError("kernels=triton: the experts' activation has no kernel; use kernels=torch")
        if any(size * down.weight.element_size() % 16 for size in down.shape[1:]):  # codes are widened to 16 bits
            raise UserError(
                "kernels=triton: rows of the experts' weights are not a multiple of 16 bytes; use kernels=torch"
            )
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._limit = limit
        num_counters = num_experts_arrivals(down.shape[1], down.shape[0])
        self._arrivals = torch.zeros(num_counters, dtype=torch.int32, device=down.weight.device)

    @property
    def expert_bytes(self) -> int:
        return self._gate_up.expert_bytes + self._down.expert_bytes

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.added_to(None, rows, routing, None)

    def added_to(
        self, stream: torch.Tensor | None, rows: torch.Tensor, routing: Routing, shared: SharedWeights | None
    ) -> torch.Tensor:
        """Return the experts' outputs for the rows, added to the stream if it is given.

        With up to 16 rows, `shared` may be given, and its output is added too; not beside narrow or clamped experts.
        """
        gate_up, down, expert_ids = self._gate_up, self._down, routing.expert_ids.contiguous()
        activation = ACTIVATIONS[self._activation]
        if 0 < len(rows) <= MAX_INVARIANT_ROWS and gate_up.scales is None and self._limit is None:
            return few_experts(
                rows,
                gate_up.weight,
                down.weight,
                expert_ids,
                routing.weights,
                None if shared is None else shared.gate_up,
                None if shared is None else shared.down,
                stream,
                self._arrivals,
                activation,
            )
        assert shared is None, "the shared expert runs separately"
        both, scales = (gate_up.weight, down.weight), (gate_up.scales, down.scales)
        if gate_up.scales is not None and expert_ids.numel() > MOST_NARROW_PAIRS * len(down.weight):
            both, scales = (gate_up.widened_by(widen, rows.dtype), down.widened_by(widen, rows.dtype)), (None, None)
        biases = gate_up.bias, down.bias
        return routed_experts(
            rows, *both, expert_ids, routing.weights, activation, stream, *scales, *biases, self._limit
        )


class TritonRouter:
    """A router in Triton. With up to 64 rows, a row's choice does not depend on the other rows."""

    __slots__ = ("_arrivals", "_bias", "_many_logits", "_sizes", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> None:
        """`weight` is [num_experts, hidden_size]; `bias` [num_experts] is added to scores for the choice only, in
        float32."""
        self._weight = weight.contiguous()
        self._many_logits = float32_product(weight)
        self._bias = bias
        self._sizes = sizes
        self._arrivals = torch.zeros(MAX_ROUTED_ROWS, dtype=torch.int32, device=weight.device)

    def __call__(self, rows: torch.Tensor) -> Routing:
        if len(rows) <= MAX_ROUTED_ROWS:
            return self.of_few(rows, None, 0.0)[0]
        return Routing(*choose_experts(self._many_logits(rows.float()), self._bias, *self._options()))

    def of_few(
        self, stream: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
    ) -> tuple[Routing, torch.Tensor]:
        """Apply an RMSNorm to up to 64 rows, if there is one; return the choice for the normed rows, and these."""
        *routing, normed = route(stream, norm_weight, eps, self._weight, self._bias, self._arrivals, *self._options())
        return Routing(*routing), normed

    def _options(self) -> tuple[int, int, int, str, bool, float]:
        sizes = self._sizes
        groups = sizes.num_groups, sizes.num_chosen_groups
        return sizes.num_chosen, *groups, str(sizes.scores), sizes.renormalized, sizes.scaling


def triton_router(weight: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> Router:
    """Make a `TritonRouter`, or a torch router if the kernel does not support the groups of experts (`can_choose`)."""
    if can_choose(sizes.num_experts, sizes.num_groups, sizes.num_chosen_groups):
        return TritonRouter(weight, bias, sizes)
    return torch_router(weight, bias, sizes)


class ResidualExperts:
    """Adds the experts of the normed stream to the stream.

    With 2 to 16 rows it takes two launches: one for norm and router, one for the experts with their sum, the shared
    expert and the residual. With a single row it takes three, since the experts take two. Experts that are narrow or
    clamped take four launches, and their shared expert its own. So does one that is gated or has another size.
    """

    __slots__ = ("_eps", "_experts", "_mlp", "_norm_weight", "_router", "_share", "_shared")

    def __init__(self, mlp: ExpertMLP, norm: WeightedNorm) -> None:
        """`mlp` must choose its experts in a way that the kernel supports (`fits_few_rows`). `norm` precedes it."""
        self._mlp = mlp
        self._norm_weight, self._eps = norm.kernel_weight, norm.eps
        self._router = cast(TritonRouter, mlp.router)
        self._experts = cast(TritonExperts, mlp.experts)
        self._shared = shared_weights(mlp)
        self._share = None if mlp.shared is None or mlp.shared.gate is None else SharedPart(mlp.shared, mlp.shared.gate)

    def __call__(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        mlp = self._mlp
        routing, rows = self._router.of_few(stream, self._norm_weight, self._eps)
        mlp.saw(routing.expert_ids)
        if self._share is not None:
            stream = self._share(stream, rows)
        elif mlp.shared is not None and self._shared is None:
            stream = stream + mlp.shared(rows)
        return self._experts.added_to(stream, rows, routing, self._shared)


class SharedPart:
    """Adds a gated shared expert to the stream. If rows are few, it takes three launches."""

    __slots__ = ("_gate", "_mlp")

    def __init__(self, plain: SharedExpert, gate: Linear) -> None:
        """`gate` is the gate of `plain`."""
        self._gate = dense(gate).weight
        self._mlp = SkinnyMLP(plain.mlp)

    def __call__(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return add_gated_share(stream, rows, self._gate, self._mlp(rows))


class AddExperts:
    """Adds the experts of normed rows to the stream, for many rows. The kernel that sums the experts also adds the
    stream."""

    __slots__ = ("_experts", "_mlp")

    def __init__(self, mlp: ExpertMLP) -> None:
        self._mlp = mlp
        self._experts = cast(TritonExperts, mlp.experts)

    def __call__(self, stream: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        mlp = self._mlp
        routing = mlp.router(normed)
        mlp.saw(routing.expert_ids)
        if mlp.shared is not None:
            stream = stream + mlp.shared(normed)
        return self._experts.added_to(stream, normed, routing, None)


def fits_few_rows(sizes: ExpertSizes) -> bool:
    """Return whether the kernel for few rows supports the way these experts are chosen."""
    return can_choose(sizes.num_experts, sizes.num_groups, sizes.num_chosen_groups)


def shared_weights(mlp: ExpertMLP) -> SharedWeights | None:
    """Return the weights of the shared expert if it is ungated, wide, and of the size of a routed expert, else None."""
    sizes = mlp.sizes
    if mlp.shared is None or sizes.shared_intermediate_size != sizes.intermediate_size or sizes.shared_gate:
        return None
    shared = mlp.shared.mlp
    assert shared.activation is F.silu, "ungated shared experts have SiLU, as the routed ones"
    gate_up, down = dense(shared.gate_up), dense(shared.down)
    return None if down.scales is not None else SharedWeights(gate_up.weight, down.weight)
