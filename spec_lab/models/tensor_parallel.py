"""Tensor parallelism: splits every layer of a target over several processes, as in Megatron-LM (Shoeybi et al., 2019).

Queries, keys, values, gate and up are split by columns, which are heads or the MLP's inner channels. Each process also
has the KV of its own heads. The products that end the two halves of a layer, o and down, are split by rows. Each
process computes a term of the sum, and an all-reduce adds the terms. So a layer needs two all-reduces. The residual
stream is the same in every process, and a drafter that reads it runs whole in each of them. Only a drafter that reads
the target's KV has its attention split too (`Gemma4Assistant`).

The embedding and the head are whole in every process, since drafters share them. A product of a few rows takes as long
as reading its weight. So each process computes the logits of some tokens only, and these are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.checkpoint_files import Part
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.errors import UserError
from spec_lab.models.collectives import Collectives
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.partition import Partition

BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_ROWS = ("o_proj", "down_proj")
"""The products that are split by rows. Megatron calls them columns and rows of W in x @ W. Here a weight is stored as
[out_features, in_features], so its columns are the first dimension, and its rows the second."""


class SummedLinear:
    """Computes this process's term of a product, adds the terms of all processes, then adds the bias."""

    __slots__ = ("_bias", "_collectives", "_term")

    def __init__(self, term: Linear, bias: torch.Tensor | None, collectives: Collectives) -> None:
        self._term = term
        self._bias = bias
        self._collectives = collectives

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = self._term(rows)
        self._collectives.add_up(out)
        return out if self._bias is None else out.add_(self._bias)


class GatheredLinear:
    """Computes some of a product's columns, and gathers all of them, [rows, out_features], in every process."""

    __slots__ = ("_collectives", "_columns", "_out_features")

    def __init__(self, columns: Linear, out_features: int, collectives: Collectives) -> None:
        self._columns = columns
        self._out_features = out_features
        self._collectives = collectives

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        parts = self._collectives.gather(self._columns(rows))
        return parts.transpose(0, 1).flatten(1)[:, : self._out_features].contiguous()


@dataclass(frozen=True, slots=True)
class TensorParallel(Partition):
    """The share of a model that process `rank` of `size` has."""

    rank: int
    size: int
    collectives: Collectives

    def share(self, plan: LayerPlan) -> LayerPlan:
        """Return the sizes of this process's share of a layer.

        Raises:
            UserError: the heads or the inner channels cannot be divided evenly, or the layer has experts, latent
                attention or a state.
        """
        problem = plan.problem_of_split(self.size)
        if problem is not None:
            raise UserError(problem)
        num_heads, num_kv_heads = plan.num_heads // self.size, plan.num_kv_heads // self.size
        inner = plan.intermediate_size // self.size
        return replace(plan, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=inner)

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        *_, projection, kind = ("", *name.split("."))
        if projection in BY_COLUMNS:
            return (self._share(shape[0]),)
        if projection in BY_ROWS and kind == "weight":
            return slice(None), self._share(shape[1])
        return None

    def output(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> Linear:
        assert scales is None, "a split target in e4m3 is refused earlier"
        return SummedLinear(make_linear(weight), bias, self.collectives)

    def head(self, weight: torch.Tensor) -> Linear:
        """Make the product. If tokens cannot be divided evenly, the last processes compute padding that is dropped."""
        vocab_size = weight.shape[0]
        share = -(-vocab_size // self.size)
        own = weight[self.rank * share : (self.rank + 1) * share]
        padded = F.pad(own, (0, 0, 0, share - own.shape[0])) if own.shape[0] < share else own
        return GatheredLinear(make_linear(padded), vocab_size, self.collectives)

    def _share(self, length: int) -> slice:
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)
