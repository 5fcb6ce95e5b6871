"""Routers and experts through the kernels of `spec_kernels`, for the few rows of a round; kernels=triton."""

from __future__ import annotations

import torch

from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS
from spec_kernels.experts import routed_experts
from spec_kernels.routing import can_choose, choose_experts, router_logits
from spec_lab.errors import UserError
from spec_lab.models.expert_sizes import ExpertSizes
from spec_lab.models.experts import Activation, ExpertsMaker, RoutedExperts, SortedExperts, has_grouped_product
from spec_lab.models.routers import Router, RouterMaker, Routing, float32_product, torch_router
from spec_lab.models.triton_linear import ACTIVATIONS

MAX_ROWS = 256
"""Above this many rows, as of a prompt's chunk, products are no longer bound by the reading of weights."""


class TritonExperts:
    """Keeps the protocol `RoutedExperts`. For up to 16 rows a row does not depend on those beside it.

    Many rows have the library's grouped product, where it has the dtype.
    """

    __slots__ = ("_activation", "_down", "_gate_up", "_many")

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> None:
        """Take what `SortedExperts` takes.

        Raises:
            UserError: the kernels have no such activation.
        """
        if activation not in ACTIVATIONS:
            raise UserError("kernels=triton: the experts' activation has no kernel; use kernels=torch")
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        is_there = has_grouped_product(gate_up.dtype, gate_up.device)
        self._many = SortedExperts(gate_up, down, activation) if is_there else None

    def __call__(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        if self._many is not None and len(rows) > MAX_ROWS:
            return self._many(rows, routing)
        out = rows.new_empty(rows.shape)
        expert_ids = routing.expert_ids.contiguous()
        name = ACTIVATIONS[self._activation]
        routed_experts(out, rows, self._gate_up, self._down, expert_ids, routing.weights, name)
        return out

    def made_by(self, make: ExpertsMaker) -> RoutedExperts:
        return make(self._gate_up, self._down, self._activation)


class TritonRouter:
    """Keeps the protocol `Router`. For up to 16 rows a row's choice does not depend on the rows beside it.

    Of more rows the library makes the logits: they share the reading of the weight.
    """

    __slots__ = ("_bias", "_many_logits", "_sizes", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> None:
        """`weight` is [num_experts, hidden_size]; `bias` [num_experts] is that of the choice, float32."""
        self._weight = weight.contiguous()
        self._many_logits = float32_product(weight)
        self._bias = bias
        self._sizes = sizes

    def __call__(self, rows: torch.Tensor) -> Routing:
        sizes = self._sizes
        if len(rows) <= MAX_INVARIANT_ROWS:
            logits = torch.empty((len(rows), sizes.num_experts), dtype=torch.float32, device=rows.device)
            router_logits(logits, rows, self._weight)
        else:
            logits = self._many_logits(rows.float())
        weights = logits.new_empty((len(rows), sizes.num_chosen))
        expert_ids = torch.empty(weights.shape, dtype=torch.int64, device=rows.device)
        groups = (sizes.num_groups, sizes.num_chosen_groups)
        choose_experts(
            *(expert_ids, weights, logits, self._bias, *groups),
            *(str(sizes.scores), sizes.renormalized, sizes.scaling),
        )
        return Routing(expert_ids, weights)

    def made_by(self, make: RouterMaker) -> Router:
        return make(self._weight, self._bias, self._sizes)


def triton_router(weight: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> Router:
    """Make a `TritonRouter`, or one of torch where groups are no powers of two."""
    if can_choose(sizes.num_experts, sizes.num_groups, sizes.num_chosen_groups):
        return TritonRouter(weight, bias, sizes)
    return torch_router(weight, bias, sizes)
