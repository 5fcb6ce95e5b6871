"""kernels=native computes forwards of up to 128 rows with the C of `spec_kernels.native`: a decoder layer is one call.

A row of those does not depend, bit for bit, on how many stand beside it. More rows go part by part, their attention to
the library, their products through the same panels, so that a weight is kept once. What a layer has that the kernels do
not know (experts, states, gates, latents) stays with the library as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from spec_kernels.native import part_operators as native
from spec_kernels.native.forwards import DraftLayerParts, NativeDraftLayer, NativeLayers
from spec_kernels.native.packing import PanelMemory
from spec_kernels.native.parts import LayerParts, NativeLayer, NativeNorm
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.protocols import DraftStart, DraftSteps
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layers import Attention, DecoderLayer, GatedMLP, RopeThenWrite, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.native_forwards import (
    MAX_ROWS,
    NativeDraftStart,
    NativeDraftSteps,
    NativeHeadLayer,
    NativeStack,
    are_few,
)
from spec_lab.models.native_parts import (
    NativeDraftInput,
    NativeLikeliest,
    NativeLinear,
    NativeRMSNorm,
    as_native,
    packed,
)
from spec_lab.models.norms import RMSNorm, WeightedNorm
from spec_lab.models.products import PlainProducts
from spec_lab.models.replaceable_parts import (
    Body,
    DraftInput,
    DraftInputs,
    DraftLayer,
    DraftLayers,
    Layer,
    LayerBody,
    LayerStack,
    Likeliest,
    LikeliestToken,
    Stack,
)
from spec_lab.models.rope import RotaryRows


class NativeBody:
    """A layer behind its first norm as one C call, or as three where rows are dropped behind attention.

    With a norm in front it is a whole layer.

    Attributes:
        layer: as the kernels read it.
    """

    __slots__ = ("_many", "layer")

    def __init__(self, layer: NativeLayer, many: Body) -> None:
        """`many` takes what is not few rows."""
        self.layer = layer
        self._many = many

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        if not are_few(rows, metadata):
            return self._many(rows, residual, rotary, cache, metadata, selection)
        behind = selection.behind(metadata)
        if behind is not None:
            live_rows = None if behind is metadata else selection.live_rows
            return self._whole(rows, residual, rotary, cache, metadata, behind, live_rows)
        layer = self.layer
        queries, metadata = selection.queries(self._project(rows, rotary, cache, metadata), metadata)
        attended = queries.new_empty(queries.shape[0], layer.num_attended)
        keys = metadata.page_table, metadata.seq_lens, metadata.num_queries
        native.attend(attended, cache.kv, queries, *keys, layer.address)
        out = residual.new_empty(residual.shape)
        native.finish(out, selection.attended(attended), residual.contiguous(), layer.address)
        return out

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        if are_few(rows, metadata):
            self._project(rows, rotary, cache, metadata)
        else:
            self._many.write(rows, rotary, cache, metadata)

    def _whole(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        behind: AttentionMetadata,
        live_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Let all rows write KV, and `live_rows`, which are all where it is None, go on with the metadata `behind`."""
        out = residual.new_empty(residual.shape)
        place = rotary.cos, rotary.signed_sin, metadata.slot_mapping
        keys = behind.page_table, behind.seq_lens
        stream, last = residual.contiguous(), (behind.num_queries, self.layer.address)
        native.decoder_layer(out, cache.kv, rows, stream, *place, *keys, live_rows, *last)
        return out

    def _project(
        self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Write KV, and return all heads [rows, heads * head_dim], queries first."""
        heads = rows.new_empty(rows.shape[0], self.layer.num_projected)
        place = rotary.cos, rotary.signed_sin, metadata.slot_mapping
        native.project(heads, cache.kv, rows, *place, self.layer.address)
        return heads


class NativeDecoderLayer:
    """A decoder layer in C: a body whose rows are the stream.

    Attributes:
        row_invariant: a row does not depend on the others, its attention included.
        body: of few rows, its norm included.
    """

    __slots__ = ("_plain", "body")
    row_invariant = True

    def __init__(self, plain: DecoderLayer, layer: NativeLayer) -> None:
        self._plain = plain
        self.body = NativeBody(layer, LayerBody(plain.attention, plain.mlp, plain.mlp_norm))

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: Any,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        if not are_few(stream, metadata):
            return self._plain(stream, rotary, cache, metadata, selection)
        if selection.is_empty:
            self.body.write(stream, rotary, cache, metadata)
            return stream[:0]
        return self.body(stream, selection.residual(stream), rotary, cache, metadata, selection)

    @property
    def attention(self) -> object:
        return self._plain.attention

    @property
    def expert_parts(self) -> tuple[ExpertMLP, ...]:
        return ()


class NativeProducts(PlainProducts):
    """Makes the parts of models that run in C: float32 on a CPU, one thread, and chains."""

    invariant_rows = MAX_ROWS

    def __init__(self) -> None:
        self._memory = PanelMemory()

    def norm(self, norm: RowsPart) -> RowsPart:
        return NativeRMSNorm(cast(WeightedNorm, norm))

    def linear(self, linear: Linear) -> Linear:
        return NativeLinear(packed(linear))

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        if not plan.fits_native:
            return layer
        body = LayerBody(layer.attention, layer.mlp, layer.mlp_norm)
        return NativeDecoderLayer(layer, self._native(body, plan, as_native(cast(RMSNorm, layer.attention_norm))))

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        return NativeBody(self._native(body, plan, NativeNorm()), body) if plan.fits_native else body

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        shapes = {(plan.num_kv_heads, plan.head_dim) for plan in plans}
        if not all(plan.fits_native for plan in plans) or len(shapes) > 1 or len(stack.rotary_tables) > 1:
            return stack
        layers = [cast(NativeDecoderLayer, layer).body.layer for layer in stack.layers]
        return NativeStack(stack, NativeLayers(layers))

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return NativeDraftInput(part)

    def draft_layer(self, part: DraftLayer, plan: LayerPlan) -> DraftLayers:
        if not plan.fits_native:
            return part
        layer, inputs = cast(NativeBody, part.body).layer, cast(NativeDraftInput, part.inputs)
        norms = inputs.embedding_norm, inputs.hidden_norm
        return NativeHeadLayer(
            part, NativeDraftLayer(DraftLayerParts(layer, *norms, inputs.embedding, part.residual_is_normed))
        )

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return NativeLikeliest(part)

    def draft_start(self, fuse: Linear, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftStart | None:
        if not plan.fits_native:
            return None
        product, head = cast(NativeLinear, fuse).product, cast(NativeLikeliest, likeliest).described
        return NativeDraftStart(product, cast(NativeHeadLayer, layer), head)

    def draft_steps(self, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftSteps | None:
        if not plan.fits_native:
            return None
        return NativeDraftSteps(cast(NativeHeadLayer, layer), cast(NativeLikeliest, likeliest).described)

    def _native(self, body: LayerBody, plan: LayerPlan, attention_norm: NativeNorm) -> NativeLayer:
        attention, mlp = cast(Attention, body.attention), cast(GatedMLP, body.mlp)
        assert mlp.activation is F.silu, "a family with another activation has layers of another kind"
        head_norm = cast(RopeThenWrite, attention.rope_and_write).qk_norm
        qkv, o, gate_up, down = (packed(linear) for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down))
        # What many rows go through reads the same panels, and the library's weights go.
        attention.qkv, attention.o = NativeLinear(qkv), NativeLinear(o)
        mlp.gate_up, mlp.down = NativeLinear(gate_up), NativeLinear(down)
        parts = LayerParts(
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            attention_norm=attention_norm,
            mlp_norm=as_native(cast(WeightedNorm, body.mlp_norm)),
            head_norm=NativeNorm() if head_norm is None else as_native(cast(WeightedNorm, head_norm)),
        )
        rotary_dim = int(plan.head_dim * plan.rope.partial_rotary_factor)
        heads = plan.num_heads, plan.num_kv_heads, plan.head_dim, rotary_dim
        page_size = cast(TorchAttention, attention.backend).page_size
        layer = NativeLayer(parts, attention.scale, *heads, page_size, plan.window)
        layer.move(self._memory.take(layer.num_bytes))
        return layer
