"""The mixers of layers (attention, latent attention, delta nets) for few rows under kernels=triton, up to their output
product. The layer's first norm, if it has one, is fused into the mixer's first product.

Before the output product, attention takes two launches, or three if heads are rotated separately. A gate is applied by
torch, in further launches. Latent attention takes four launches, or five if its queries have a bottleneck. If some rows
need no query, it takes two more. If keys are split, one more launch merges the splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.product_tiles import MAX_ROWS
from spec_kernels.project_heads import fits_scales, project_heads
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.passes import Pass
from spec_lab.models.delta_net import GatedDeltaNet
from spec_lab.models.latent import LatentAttention, NarrowQuery
from spec_lab.models.layers import Attention, LayerParts, Mixer
from spec_lab.models.linear import DenseLinear, StreamedLinear
from spec_lab.models.norms import WeightedNorm
from spec_lab.operators.triton_linear import SkinnyLinear, SkinnyProduct, TritonNorm, dense, no_arrivals


@dataclass(frozen=True, slots=True)
class ProjectedAttention:
    """Computes a mixer's first product in one launch, and leaves the rest to the mixer.

    The mixer is a delta net, or attention with heads of any kind. Attention rotates and writes them in another launch.
    """

    attention: Attention | GatedDeltaNet
    qkv: SkinnyProduct

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        return self.attention.attended(self.qkv(rows), at)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        self.attention.write_projected(self.qkv(rows), at)


class FusedHeadsAttention:
    """Makes, rotates and writes heads in one launch, for attention that rotates whole heads, without norms of heads and
    without gates."""

    __slots__ = ("_arrivals", "_attention", "_bias", "_eps", "_norm_weight", "_scales", "_weight")

    def __init__(self, attention: Attention, norm: WeightedNorm | None) -> None:
        linear = dense(attention.qkv)
        self._attention = attention
        self._weight, self._scales, self._bias = linear.weight, linear.scales, linear.bias
        self._norm_weight = None if norm is None else norm.kernel_weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._arrivals = no_arrivals(linear.shape[0], linear.weight.device)

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        return self._attention.mixed(self._heads(rows, at), at)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        self._heads(rows, at)

    def _heads(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        """Write KV, and return rotated queries [rows, num_heads, head_dim]."""
        queries = rows.new_empty(rows.shape[0], self._attention.num_heads, self._attention.head_dim)
        project_heads(
            queries,
            at.cache.kv,
            rows,
            self._weight,
            self._arrivals,
            self._bias,
            self._norm_weight,
            self._eps,
            *at.rotary.flat,
            at.metadata.slot_mapping,
            self._scales,
        )
        return queries


class SkinnyQuery:
    """Computes queries by two products with a norm between them. Up to 16 rows, the norm is fused into the second."""

    __slots__ = ("_few", "_many", "_narrow", "_norm")

    def __init__(self, query: NarrowQuery) -> None:
        self._narrow = SkinnyLinear(dense(query.narrow))
        self._few = SkinnyProduct(dense(query.widen), query.norm)
        self._norm, self._many = TritonNorm.of(query.norm), query.widen

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        narrow = self._narrow(rows)
        return self._few(narrow) if 0 < len(rows) <= MAX_ROWS else self._many(self._norm(narrow))


class NarrowProducts:
    """The first products of latent attention: one that makes both queries and cache rows, or a separate product for
    each if some rows need no query. They share one weight."""

    __slots__ = ("_both", "_query", "_query_width", "_row")

    def __init__(self, query: StreamedLinear, row: StreamedLinear, norm: WeightedNorm | None) -> None:
        both = DenseLinear(torch.cat((query.weight, row.weight)), _cat_bias(query, row))
        self._query_width = len(query.weight)  # `q_lora_rank`, or the width of all heads without a bottleneck
        # These are views of `both`, so that the weights are stored once.
        query.weight, row.weight = both.weight[: self._query_width], both.weight[self._query_width :]
        self._both, self._query, self._row = (SkinnyProduct(part, norm) for part in (both, query, row))

    def both(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries, still narrow if they have a bottleneck, and cache rows without their norm."""
        queries, projected = self._both(rows).tensor_split((self._query_width,), dim=1)
        return queries, projected

    def query(self, rows: torch.Tensor) -> torch.Tensor:
        return self._query(rows)

    def row(self, rows: torch.Tensor) -> torch.Tensor:
        return self._row(rows)


def _cat_bias(query: StreamedLinear, row: StreamedLinear) -> torch.Tensor | None:
    """Return the concatenated biases. If only `row` has one, as without a bottleneck, those of queries are zeros."""
    if row.bias is None:
        assert query.bias is None
        return None
    return torch.cat((row.bias.new_zeros(len(query.weight)) if query.bias is None else query.bias, row.bias))


class NarrowLatentAttention:
    """Latent attention whose first products are fused into one if all rows attend."""

    __slots__ = ("_attention", "_narrow", "_widen")

    def __init__(self, attention: LatentAttention, norm: WeightedNorm | None) -> None:
        narrow, query = attention.narrow, attention.query
        if narrow is not None:
            query = narrow.narrow
        self._widen = None if narrow is None else SkinnyProduct(dense(narrow.widen), narrow.norm)
        self._attention = attention
        self._narrow = NarrowProducts(dense(query), dense(attention.row), norm)

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        attending, _ = at.kept.queries(rows, at.metadata)
        if attending is rows:
            narrow, projected = self._narrow.both(rows)
            return self._attention.written_and_attended(self._queries(narrow), projected, at)
        self._attention.write_projected(self._narrow.row(rows), at)
        here = at.of_queries()
        return self._attention.attended(self._queries(self._narrow.query(attending)), here)

    def _queries(self, narrow: torch.Tensor) -> torch.Tensor:
        return narrow if self._widen is None else self._widen(narrow)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        self._attention.write_projected(self._narrow.row(rows), at)


def few_rows_mixer(parts: LayerParts, plan: LayerPlan) -> Mixer:
    """Make a layer's mixer for few rows, which includes the layer's first norm."""
    if parts.latent is not None:
        return NarrowLatentAttention(parts.latent, parts.norm)
    attention = parts.delta_net if parts.attention is None else parts.attention
    assert attention is not None
    turns_whole = plan.rope.partial_rotary_factor == 1.0
    is_plain = turns_whole and not (plan.qk_norm or plan.attention_gate or plan.float32_norms)
    if parts.attention is not None and is_plain and (dense(attention.qkv).scales is None or fits_scales(plan.head_dim)):
        return FusedHeadsAttention(parts.attention, parts.norm)
    return ProjectedAttention(attention, SkinnyProduct(dense(attention.qkv), parts.norm))
