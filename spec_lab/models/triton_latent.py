"""This module has kernels=triton for products of up to 64 rows in latent attention and in shared experts."""

from __future__ import annotations

from typing import cast

import torch

from spec_kernels.product_tiles import MAX_ROWS
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.latent import LatentAttention, NarrowQuery
from spec_lab.models.layers import DecoderLayer, GatedMLP, RowsPart
from spec_lab.models.plan import LayerPlan
from spec_lab.models.products import Body, Layer, LayerBody
from spec_lab.models.triton_linear import SkinnyLinear, SkinnyMLP, SkinnyProduct, TritonNorm, dense
from spec_lab.models.triton_products import TritonProducts


class SkinnyQuery:
    """Is a `NarrowQuery` whose norm is inside its second product."""

    __slots__ = ("_few", "_many", "_narrow", "_norm")

    def __init__(self, query: NarrowQuery) -> None:
        self._narrow = SkinnyLinear(dense(query.narrow))
        self._few = SkinnyProduct(dense(query.widen), query.norm)
        self._norm, self._many = TritonNorm.of(query.norm), query.widen

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        narrow = self._narrow(rows)
        return self._few(narrow) if 0 < len(rows) <= MAX_ROWS else self._many(self._norm(narrow))


class TritonLayerProducts(TritonProducts):
    """Does what `TritonProducts` does, and the same for latent attention and for the shared expert of a layer."""

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        self._shared_expert(layer.mlp, plan)
        if plan.latent is None or plan.float32_norms:
            return super().layer(layer, plan)
        norms = [self.norm(norm) for norm in (layer.attention_norm, layer.mlp_norm)]
        return DecoderLayer(self._attention(layer.attention, plan), self._mlp(layer.mlp, plan), *norms)

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        self._shared_expert(body.mlp, plan)
        if plan.latent is None or plan.float32_norms:
            return super().body(body, plan)
        attention = self._attention(body.attention, plan)
        return LayerBody(attention, self._mlp(body.mlp, plan), self.norm(body.mlp_norm))

    def _attention(self, attention: object, plan: LayerPlan) -> LatentAttention:
        """Replace the products of latent attention."""
        latent = cast(LatentAttention, attention)
        assert plan.latent is not None
        is_narrow = plan.latent.q_lora_rank is not None
        latent.query = SkinnyQuery(cast(NarrowQuery, latent.query)) if is_narrow else self.linear(latent.query)
        latent.row, latent.o = self.linear(latent.row), self.linear(latent.o)
        return latent

    def _mlp(self, mlp: RowsPart, plan: LayerPlan) -> RowsPart:
        return mlp if plan.experts is not None or plan.mlp_bias else SkinnyMLP(cast(GatedMLP, mlp))

    def _shared_expert(self, mlp: RowsPart, plan: LayerPlan) -> None:
        """Replace the shared expert of an `ExpertMLP`, where it is a plain MLP."""
        sizes = plan.experts
        if sizes is not None and sizes.shared_intermediate_size and not sizes.shared_gate:
            experts = cast(ExpertMLP, mlp)
            experts.shared = SkinnyMLP(cast(GatedMLP, experts.shared))
