"""Experts through the kernels of `spec_kernels.experts`, for the few rows of a round; kernels=triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_kernels.experts import routed_experts
from spec_lab.errors import UserError
from spec_lab.models.experts import Activation, ExpertsMaker, RoutedExperts, SortedExperts, has_grouped_product
from spec_lab.models.layers import gelu_tanh
from spec_lab.models.routers import Routing

ACTIVATIONS: dict[Activation, str] = {F.silu: "silu", gelu_tanh: "gelu_tanh"}
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
