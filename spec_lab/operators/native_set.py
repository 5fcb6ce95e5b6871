"""kernels=native computes forwards of up to 128 rows with the C code of `spec_kernels.native`.

A call computes a decoder layer, or all layers of a target (`NativeProducts.stack`) if no row is dropped. A row's
result then does not depend, bit for bit, on the number of rows. Forwards of more rows are computed part by part:
attention by the library, and products by C with the same packed weights, so that each weight is stored once. Whole
layers that the kernels do not support (`native_takes`) are left to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from spec_kernels.native import part_operators as native
from spec_kernels.native.forwards import DraftLayerParts, NativeDraftLayer, NativeLayers
from spec_kernels.native.packing import PanelMemory
from spec_kernels.native.parts import NativeLayer, NativeLayerParts, NativeNorm
from spec_kernels.native.rounds import catchup_places, commit_rows, extend_and_look_up, strict_accept
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.passes import Pass
from spec_lab.core.pruning import Drop
from spec_lab.models.draft_parts import (
    DraftInput,
    DraftInputs,
    HeadLayer,
    Likeliest,
    LikeliestToken,
    RecurrentKernels,
    RecurrentParts,
)
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layer_stack import Layer, LayerStack, Stack
from spec_lab.models.layers import DecoderLayer, LayerParts, RopeThenWrite
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RowsPart, WeightedNorm
from spec_lab.models.products import PlainProducts, recurrent_by_parts
from spec_lab.operators.kernel_set import Op
from spec_lab.operators.native_forwards import (
    MAX_ROWS,
    NativeChain,
    NativeHeadLayer,
    NativeStack,
    are_few,
)
from spec_lab.operators.native_parts import (
    NativeDraftInput,
    NativeLikeliest,
    NativeLinear,
    NativeRMSNorm,
    as_native,
    packed,
)
from spec_lab.operators.promises import native_takes

NATIVE_FUNCTIONS: Mapping[Op, Callable[..., Any]] = {
    Op.STRICT_ACCEPT: strict_accept,
    Op.CATCHUP_PLACES: catchup_places,
    Op.COMMIT_ROWS: commit_rows,
    Op.LOOK_UP: extend_and_look_up,
}
"""The functions with which `kernels=native` replaces functions without weights."""


class NativeDecoderLayer:
    """A decoder layer as one C call.

    Attributes:
        row_invariant: whether a row's result, including attention, does not depend on the other rows if they are few.
        layer: the layer as the kernels read it.
    """

    __slots__ = ("_many", "layer")
    row_invariant = True

    def __init__(self, layer: NativeLayer, many: DecoderLayer) -> None:
        """`many` is the layer for many rows, and for ragged forwards (`are_few`)."""
        self.layer = layer
        self._many = many

    @property
    def experts(self) -> ExpertMLP | None:
        return self._many.experts

    def __call__(self, stream: torch.Tensor, at: Pass, rows: torch.Tensor | None = None) -> torch.Tensor:
        metadata, kept = at.metadata, at.kept
        if not are_few(stream, metadata):
            return self._many(stream, at, rows)
        if rows is None:
            rows = stream
        residual = kept.residual(stream)
        attending = kept.behind(metadata) if kept.drop is Drop.BEFORE_ATTENTION else metadata
        out = residual.new_empty(residual.shape)
        native.decoder_layer(
            out,
            at.cache.kv,
            rows,
            residual.contiguous(),
            at.rotary.cos,
            at.rotary.signed_sin,
            metadata.slot_mapping,
            attending.page_table,
            attending.seq_lens,
            kept.rows if kept.drop.is_inside else None,
            attending.num_queries,
            attending is metadata,
            self.layer.address,
        )
        return out


class NativeProducts(PlainProducts):
    """Makes the parts of models that run in C, for float32 on a CPU and for chains of drafts."""

    invariant_rows = MAX_ROWS

    def __init__(self) -> None:
        self._memory = PanelMemory()

    def norm(self, norm: WeightedNorm) -> RowsPart:
        return NativeRMSNorm(norm)

    def linear(self, linear: Linear) -> Linear:
        return NativeLinear(packed(linear))

    def layer(self, parts: LayerParts, plan: LayerPlan) -> Layer:
        return self._whole_layer(parts, plan) if native_takes(plan) else DecoderLayer.of(parts)

    def _whole_layer(self, parts: LayerParts, plan: LayerPlan) -> NativeDecoderLayer:
        attention, mlp = parts.attention, parts.dense
        assert attention is not None and mlp is not None
        assert mlp.activation is F.silu, "a family with another activation has layers of another kind"
        head_norm = cast(RopeThenWrite, attention.rope_and_write).qk_norm
        qkv, o, gate_up, down = (packed(linear) for linear in (attention.qkv, parts.o, mlp.gate_up, mlp.down))
        # The parts for many rows read the same packed weights, and the library's weights are freed.
        attention.qkv, attention.o, parts.o = NativeLinear(qkv), NativeLinear(o), NativeLinear(o)
        mlp.gate_up, mlp.down = NativeLinear(gate_up), NativeLinear(down)
        own = NativeLayerParts(
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            attention_norm=NativeNorm() if parts.norm is None else as_native(parts.norm),
            mlp_norm=as_native(parts.mlp_norm),
            head_norm=NativeNorm() if head_norm is None else as_native(cast(WeightedNorm, head_norm)),
        )
        rotary_dim = int(plan.head_dim * plan.rope.partial_rotary_factor)
        backend: Any = attention.backend  # native kernels only run with backends of paged keys and values
        layer = NativeLayer(
            own,
            attention.scale,
            plan.num_heads,
            plan.num_kv_heads,
            plan.head_dim,
            rotary_dim,
            backend.page_size,
            plan.window,
        )
        layer.move(self._memory.take(layer.num_bytes))
        return NativeDecoderLayer(layer, DecoderLayer.of(parts))

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        shapes = {(plan.num_kv_heads, plan.head_dim) for plan in plans}
        if not all(map(native_takes, plans)) or len(shapes) > 1 or len(stack.rotary_tables) > 1:
            return stack
        layers = [cast(NativeDecoderLayer, layer).layer for layer in stack.layers]
        return NativeStack(stack, NativeLayers(layers))

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return NativeDraftInput(part)

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return NativeLikeliest(part)

    def recurrent(self, parts: RecurrentParts, plan: LayerPlan) -> RecurrentKernels:
        if not native_takes(plan):
            return recurrent_by_parts(self, parts, plan)
        fuse, layer = NativeLinear(packed(parts.fuse)), self._whole_layer(parts.layer, plan)
        likeliest, inputs = NativeLikeliest(parts.likeliest), NativeDraftInput(parts.inputs)
        by_parts = HeadLayer(inputs, layer, parts.rotary, parts.residual_is_normed)
        described = NativeDraftLayer(
            DraftLayerParts(
                layer.layer, inputs.embedding_norm, inputs.hidden_norm, inputs.embedding, parts.residual_is_normed
            )
        )
        run = NativeHeadLayer(by_parts, parts.rotary, described)
        if parts.output_is_normed:
            return RecurrentKernels(fuse, by_parts, likeliest, run)
        chain = NativeChain(None if parts.features_are_normed else fuse.product, run, likeliest.described)
        return RecurrentKernels(fuse, by_parts, likeliest, run, chain)
