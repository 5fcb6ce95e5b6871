"""Few rows of a layer go from the stream to what attention gives by these kernels, before the output product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from spec_kernels.project_heads import fits_scales, project_heads
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.layers import Attention
from spec_lab.models.norms import RMSNorm
from spec_lab.models.rope import RotaryRows
from spec_lab.models.triton_linear import SkinnyProduct, dense, no_arrivals


class FewRowsAttention(Protocol):
    """The attention of few rows without its output product; a norm of the rows may be inside."""

    def attended(
        self,
        rows: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Write the KV of all rows, and attend: [kept rows, width]."""
        ...

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        """Write the KV of all rows, and nothing else."""
        ...


@dataclass(frozen=True, slots=True)
class ProjectedAttention:
    """Makes heads in one launch and rotates and writes them in another: heads of every kind."""

    attention: Attention
    qkv: SkinnyProduct

    def attended(
        self,
        rows: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        return self.attention.attended(self.qkv(rows), rotary, cache, metadata, selection)

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        self.attention.write_projected(self.qkv(rows), rotary, cache, metadata)


class FusedHeadsAttention:
    """Makes, rotates and writes heads in one launch: those that turn whole, without norms or gates."""

    __slots__ = ("_arrivals", "_attention", "_bias", "_eps", "_norm_weight", "_scales", "_weight")

    def __init__(self, attention: Attention, norm: RMSNorm | None) -> None:
        linear = dense(attention.qkv)
        self._attention = attention
        self._weight, self._scales, self._bias = linear.weight, linear.scales, linear.bias
        self._norm_weight = None if norm is None else norm.weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._arrivals = no_arrivals(linear.shape[0], linear.weight.device)

    def attended(
        self,
        rows: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        return self._attention.mixed(self._projected(rows, rotary, cache, metadata), cache, metadata, selection)

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        self._projected(rows, rotary, cache, metadata)

    def _projected(
        self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Write KV, and return roped queries [rows, num_heads, head_dim]."""
        queries = rows.new_empty(rows.shape[0], self._attention.num_heads, self._attention.head_dim)
        turns = rotary.cos.squeeze(1), rotary.signed_sin.squeeze(1), metadata.slot_mapping
        parts = self._arrivals, self._bias, self._norm_weight, self._eps
        project_heads(queries, cache.kv, rows, self._weight, *parts, *turns, self._scales)
        return queries


def few_rows_attention(attention: Attention, plan: LayerPlan, norm: RMSNorm | None) -> FewRowsAttention:
    """Make a layer's attention of few rows, with `norm` before it where one is given."""
    turns_whole = plan.rope.partial_rotary_factor == 1.0
    is_plain = turns_whole and not (plan.qk_norm or plan.attention_gate or plan.float32_norms)
    if is_plain and (dense(attention.qkv).scales is None or fits_scales(plan.head_dim)):
        return FusedHeadsAttention(attention, norm)
    return ProjectedAttention(attention, SkinnyProduct(dense(attention.qkv), norm))
