"""kernels=triton in layers with latent attention and in shared experts: a layer of up to 16 rows is nine launches,
and with experts and one row ten."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from spec_kernels.product_tiles import MAX_ROWS
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.latent import LatentAttention, NarrowQuery
from spec_lab.models.layers import DecoderLayer, GatedMLP, RowsPart
from spec_lab.models.linear import DenseLinear, StreamedLinear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.replaceable_parts import Body, Layer, LayerBody
from spec_lab.models.rope import RotaryRows
from spec_lab.models.triton_layer import ManyRowsBody
from spec_lab.models.triton_linear import SkinnyLinear, SkinnyMLP, SkinnyProduct, TritonNorm, dense
from spec_lab.models.triton_products import TritonProducts


class SkinnyQuery:
    """A query in two narrow products; the norm between them is inside the second."""

    __slots__ = ("_few", "_many", "_narrow", "_norm")

    def __init__(self, query: NarrowQuery) -> None:
        self._narrow = SkinnyLinear(dense(query.narrow))
        self._few = SkinnyProduct(dense(query.widen), query.norm)
        self._norm, self._many = TritonNorm.of(query.norm), query.widen

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        narrow = self._narrow(rows)
        return self._few(narrow) if 0 < len(rows) <= MAX_ROWS else self._many(self._norm(narrow))


class NarrowProducts:
    """Makes the first products of latent attention: one of all rows to their queries and cache rows both, or, where
    some rows make no query, one of each. The weight is the same.

    `query_width`: of what the first of them gives, `q_lora_rank` or whole queries.
    """

    __slots__ = ("_both", "_query", "_query_width", "_row")

    def __init__(self, query: StreamedLinear, row: StreamedLinear, norm: RMSNorm | None) -> None:
        both = DenseLinear(torch.cat((query.weight, row.weight)), _cat_bias(query, row))
        self._query_width = len(query.weight)
        # Views of it: the weights are kept once.
        query.weight, row.weight = both.weight[: self._query_width], both.weight[self._query_width :]
        self._both, self._query, self._row = (SkinnyProduct(part, norm) for part in (both, query, row))

    def both(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, and cache rows before their norm."""
        queries, projected = self._both(rows).tensor_split((self._query_width,), dim=1)
        return queries, projected

    def query(self, rows: torch.Tensor) -> torch.Tensor:
        return self._query(rows)

    def row(self, rows: torch.Tensor) -> torch.Tensor:
        return self._row(rows)


def _cat_bias(query: StreamedLinear, row: StreamedLinear) -> torch.Tensor | None:
    """Return the biases of both; a family has them in both or in none."""
    assert (query.bias is None) == (row.bias is None)
    return None if query.bias is None or row.bias is None else torch.cat((query.bias, row.bias))


class FusedLatentBody:
    """A layer body with latent attention; with `norm` it is a whole layer, whose first norm is inside the first
    product."""

    __slots__ = ("_attention", "_many", "_max_rows", "_narrow", "_o", "_rows_part", "_widen")

    def __init__(
        self,
        attention: LatentAttention,
        rows_part: Callable[[torch.Tensor], torch.Tensor],
        norm: RMSNorm | None,
        many: ManyRowsBody,
        max_rows: int,
    ) -> None:
        """`many`, for more than `max_rows`, takes rows that have been normed."""
        query, self._widen = attention.query, None
        if attention.sizes.q_lora_rank is not None:
            narrow = cast(NarrowQuery, query)
            query, self._widen = narrow.narrow, SkinnyProduct(dense(narrow.widen), narrow.norm)
        self._attention = attention
        self._narrow = NarrowProducts(dense(query), dense(attention.row), norm)
        self._o = SkinnyProduct(dense(attention.o))
        self._rows_part = rows_part
        self._many = many
        self._max_rows = max_rows

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        if rows.shape[0] > self._max_rows:
            return self._many(rows, residual, rotary, cache, metadata, selection)
        attending, live_metadata = selection.queries(rows, metadata)
        if attending is rows:
            narrow, projected = self._narrow.both(rows)
            where = (rotary, cache, metadata, selection)
            attended = self._attention.written_and_attended(self._queries(narrow), projected, *where)
        else:
            self._attention.write_projected(self._narrow.row(rows), rotary, cache, metadata)
            turns = RotaryRows(*(selection.queries(turn, metadata)[0] for turn in (rotary.cos, rotary.signed_sin)))
            queries = self._queries(self._narrow.query(attending))
            attended = self._attention.attended(queries, turns, cache, live_metadata, selection)
        return self._rows_part(self._o(attended, residual))

    def _queries(self, narrow: torch.Tensor) -> torch.Tensor:
        return narrow if self._widen is None else self._widen(narrow)

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        if rows.shape[0] > self._max_rows:
            self._many.write(rows, rotary, cache, metadata)
        else:
            self._attention.write_projected(self._narrow.row(rows), rotary, cache, metadata)


class TritonLayerProducts(TritonProducts):
    """Does what `TritonProducts` does, and the same for latent attention and for the shared expert of a layer."""

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        fused = self.fused_layer(layer, plan) if has_latent_kernels(plan) else super().layer(layer, plan)
        self._shared_expert(layer.mlp, plan)
        return fused

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        fused: Body
        if has_latent_kernels(plan):
            fused = self._few_rows(body, plan, None, self._many_rows(body, plan))
        else:
            fused = super().body(body, plan)
        self._shared_expert(body.mlp, plan)
        return fused

    def _few_rows(self, body: LayerBody, plan: LayerPlan, norm: RMSNorm | None, many: ManyRowsBody) -> Body:
        if not has_latent_kernels(plan):
            return super()._few_rows(body, plan, norm, many)
        attention = cast(LatentAttention, body.attention)
        rows_part = self.rows_part(body.mlp, cast(RMSNorm, body.mlp_norm), plan)
        few = FusedLatentBody(attention, rows_part, norm, many, self._few)
        self._replace_products(attention, plan)
        return few

    def _replace_products(self, latent: LatentAttention, plan: LayerPlan) -> None:
        """Replace the products of latent attention, which more rows go through."""
        assert plan.latent is not None
        is_narrow = plan.latent.q_lora_rank is not None
        latent.query = SkinnyQuery(cast(NarrowQuery, latent.query)) if is_narrow else self.linear(latent.query)
        latent.row, latent.o = self.linear(latent.row), self.linear(latent.o)

    def _shared_expert(self, mlp: RowsPart, plan: LayerPlan) -> None:
        """Replace the shared expert of an `ExpertMLP`, where it is a plain MLP."""
        sizes = plan.experts
        if sizes is not None and sizes.shared_intermediate_size and not sizes.shared_gate:
            experts = cast(ExpertMLP, mlp)
            experts.shared = SkinnyMLP(cast(GatedMLP, experts.shared))


def has_latent_kernels(plan: LayerPlan) -> bool:
    """Tell whether a layer has latent attention, and norms that round before their weight."""
    return plan.latent is not None and not plan.float32_norms
