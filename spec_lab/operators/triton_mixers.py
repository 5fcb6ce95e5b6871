"""The mixers of layers (attention, latent attention, delta nets) for few rows under kernels=triton, up to their output
product. The layer's first norm, if it has one, is fused into the mixer's first product.

Before the output product, attention takes two launches, or three if heads are rotated separately. A gate is applied by
torch, in further launches. Latent attention takes four launches, or five if its queries have a bottleneck. If some rows
need no query, it takes two more. If keys are split, one more launch merges the splits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spec_kernels.product_tiles import MAX_ROWS
from spec_kernels.project_heads import fits_scales, project_heads
from spec_lab.core.passes import Pass
from spec_lab.models.delta_net import GatedDeltaNet
from spec_lab.models.latent import LatentAttention, NarrowQuery
from spec_lab.models.layers import Attention, DecoderLayer, Mixer
from spec_lab.models.linear import DenseLinear, StreamedLinear
from spec_lab.models.norms import WeightedNorm
from spec_lab.operators.triton_linear import SkinnyLinear, SkinnyProduct, TritonNorm, dense, no_arrivals


class FusedHeadsAttention:
    """Makes, rotates and writes heads in one launch, for attention that rotates whole heads, without norms of heads and
    without gates.

    A program has a part of a head, which does not say by what a narrow cache divides the head. So for such a cache the
    heads are made in a launch of their own.
    """

    __slots__ = ("_apart", "_arrivals", "_attention", "_bias", "_eps", "_norm_weight", "_scales", "_weight")

    def __init__(self, attention: Attention, norm: WeightedNorm | None) -> None:
        linear = dense(attention.qkv)
        self._attention, self._apart = attention, SkinnyProduct(linear, norm)
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
        if at.cache.powers is not None:
            heads = self._apart(rows).unflatten(-1, (-1, self._attention.head_dim))
            return self._attention.rope_and_write(heads, at)
        return project_heads(
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


def sharing_inputs(attention: LatentAttention) -> tuple[LatentAttention, StreamedLinear]:
    """Return the first two products of latent attention as one, and the attention whose products are views of it, so
    that the weights are stored once."""
    query, row = attention.query, dense(attention.row)
    first = dense(query.narrow if isinstance(query, NarrowQuery) else query)
    both, width = DenseLinear(torch.cat((first.weight, row.weight)), _cat_bias(first, row)), len(first.weight)
    first, row = DenseLinear(both.weight[:width], first.bias), DenseLinear(both.weight[width:], row.bias)
    return replace(
        attention, query=replace(query, narrow=first) if isinstance(query, NarrowQuery) else first, row=row
    ), both


def _cat_bias(query: StreamedLinear, row: StreamedLinear) -> torch.Tensor | None:
    """Return the concatenated biases. If only `row` has one, as without a bottleneck, those of queries are zeros."""
    if row.bias is None:
        assert query.bias is None
        return None
    return torch.cat((row.bias.new_zeros(len(query.weight)) if query.bias is None else query.bias, row.bias))


class NarrowLatentAttention:
    """Latent attention whose first products are fused into one if all rows attend."""

    __slots__ = ("_attention", "_both", "_query", "_query_width", "_row", "_widen")

    def __init__(self, attention: LatentAttention, both: StreamedLinear, norm: WeightedNorm | None) -> None:
        """`both` has the weights of both products of `attention` (`sharing_inputs`)."""
        query = attention.query
        self._widen: SkinnyProduct | None = None
        if isinstance(query, NarrowQuery):
            self._widen = SkinnyProduct(dense(query.widen), query.norm)
            query = query.narrow
        parts = both, dense(query), dense(attention.row)
        self._query_width = parts[1].shape[0]  # `q_lora_rank`, or the width of all heads without a bottleneck
        self._both, self._query, self._row = (SkinnyProduct(part, norm) for part in parts)
        self._attention = attention

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        attending, _ = at.kept.queries(rows, at.metadata)
        if attending is rows:
            narrow, projected = self._both(rows).tensor_split((self._query_width,), dim=1)
            return self._attention.written_and_attended(self._widened(narrow), projected, at)
        self.write(rows, at)
        here = at.of_queries()
        return self._attention.attended(self._widened(self._query(attending)), here)

    def _widened(self, narrow: torch.Tensor) -> torch.Tensor:
        return narrow if self._widen is None else self._widen(narrow)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        self._attention.write_projected(self._row(rows), at)


def few_rows_mixer(layer: DecoderLayer) -> Mixer:
    """Make attention or a delta net for few rows, which includes the layer's first norm."""
    plan, mixer, norm = layer.plan, layer.mixer, layer.norm
    assert isinstance(mixer, Attention | GatedDeltaNet)
    qkv = dense(mixer.qkv)
    is_plain = plan.rope.partial_rotary_factor == 1.0
    is_plain = is_plain and not (plan.qk_norm or plan.attention_gate or plan.float32_norms)
    if isinstance(mixer, Attention) and is_plain and (qkv.scales is None or fits_scales(plan.head_dim)):
        return FusedHeadsAttention(mixer, norm)
    return replace(mixer, qkv=SkinnyProduct(qkv, norm))
