"""kernels=native computes forwards of up to 128 rows with the C code of `spec_kernels.native`.

A call computes a decoder layer, or all layers of a target (`native_stack`) if no row is dropped. A row's
result then does not depend, bit for bit, on the number of rows. Forwards of more rows are computed part by part:
attention by the library, and products by C with the same packed weights, so that each weight is stored once. Whole
layers that the kernels do not support (`native_takes`) are left to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from spec_kernels.native import part_operators as native
from spec_kernels.native.build import library
from spec_kernels.native.forwards import DraftLayerParts, NativeDraftLayer, NativeLayers
from spec_kernels.native.packing import PanelMemory
from spec_kernels.native.parts import NativeLayer, NativeLayerParts, NativeNorm
from spec_kernels.native.rounds import catchup_places, commit_rows, extend_and_look_up, strict_accept
from spec_lab.attention.native_backend import NativeAttention
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kept import Drop
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.core.passes import Pass
from spec_lab.models.draft_parts import DraftLayers, HeadLayer
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.layer_stack import Layer, LayerStack, Stack
from spec_lab.models.layers import AddPart, AddThenNorm, Attention, DecoderLayer, RopeThenWrite
from spec_lab.models.linear import GatedMLP
from spec_lab.models.norms import WeightedNorm
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
    def plan(self) -> LayerPlan:
        return self._many.plan

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


class NativeParts:
    """Makes the parts of models that run in C, for float32 on a CPU and for chains of drafts."""

    def __init__(self) -> None:
        self._memory = PanelMemory()

    def layer(self, layer: DecoderLayer) -> Layer:
        if not native_takes(layer.plan):
            return layer
        plan, attention, close, finish = layer.plan, layer.mixer, layer.close, layer.finish
        assert isinstance(attention, Attention) and isinstance(close, AddThenNorm) and isinstance(finish, AddPart)
        mlp = finish.part
        assert isinstance(mlp, GatedMLP)
        assert mlp.activation is F.silu, "a family with another activation has layers of another kind"
        head_norm = cast(RopeThenWrite, attention.rope_and_write).qk_norm
        qkv, o, gate_up, down = map(packed, (attention.qkv, close.product, mlp.gate_up, mlp.down))
        own = NativeLayerParts(
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            attention_norm=NativeNorm() if layer.norm is None else as_native(layer.norm),
            mlp_norm=as_native(close.norm),
            head_norm=NativeNorm() if head_norm is None else as_native(cast(WeightedNorm, head_norm)),
        )
        rotary_dim = int(plan.head_dim * plan.rope.partial_rotary_factor)
        backend: Any = attention.backend  # native kernels only run with backends of paged keys and values
        native_layer = NativeLayer(
            parts=own,
            scale=attention.scale,
            num_heads=plan.num_heads,
            num_kv_heads=plan.num_kv_heads,
            head_dim=plan.head_dim,
            rotary_dim=rotary_dim,
            page_size=backend.page_size,
            window=plan.window,
        )
        native_layer.move(self._memory.take(native_layer.num_bytes))
        # The parts for many rows read the same packed weights, and the library's weights are freed.
        many = replace(
            layer,
            mixer=replace(attention, qkv=NativeLinear(qkv), o=NativeLinear(o)),
            close=AddThenNorm(NativeLinear(o), close.norm),
            finish=AddPart(GatedMLP(NativeLinear(gate_up), NativeLinear(down))),
        )
        return NativeDecoderLayer(native_layer, many)


def native_stack(stack: LayerStack) -> Stack:
    """Run all layers in one call, if C has each of them, and they have the same heads."""
    layers = [layer for layer in stack.layers if isinstance(layer, NativeDecoderLayer)]
    shapes = {(layer.plan.num_kv_heads, layer.plan.head_dim) for layer in layers}
    if len(layers) < len(stack.layers) or len(shapes) > 1 or len(stack.rotary_tables) > 1:
        return stack
    return NativeStack(stack, NativeLayers([layer.layer for layer in layers]))


def native_head_layer(head: HeadLayer) -> DraftLayers:
    """Run a head's input and layer in one call, if C has the layer."""
    inputs, layer = head.inputs, head.layer
    if not isinstance(layer, NativeDecoderLayer):
        return head
    assert isinstance(inputs, NativeDraftInput)
    parts = DraftLayerParts(
        layer.layer,
        inputs.embedding_norm,
        inputs.hidden_norm,
        inputs.embedding,
        residual_is_normed=head.residual_is_normed,
    )
    return NativeHeadLayer(head, head.rotary, NativeDraftLayer(parts))


def native_chain(head: Any) -> NativeChain | None:
    """Draft a chain in two calls, if C has the layer of an EAGLE-3 head, whose output is fed back without a norm."""
    if not isinstance(head, Eagle3Head) or not isinstance(head.run, NativeHeadLayer) or head.config.norm_output:
        return None
    fuse = cast(NativeLinear, head.fc).product if head.tap_norm is None else None
    return NativeChain(fuse, head.run, cast(NativeLikeliest, head.likeliest).described)


NATIVE_FUNCTIONS: Mapping[Op, Callable[..., Any]] = {
    Op.STRICT_ACCEPT: strict_accept,
    Op.CATCHUP_PLACES: catchup_places,
    Op.COMMIT_ROWS: commit_rows,
    Op.LOOK_UP: extend_and_look_up,
}
"""The replacements of the functions of a round."""


def native_set() -> KernelSet:
    """Make the set of kernels=native, and compile it now, before any weight is read."""
    library()
    parts: dict[Op, Callable[[Any], Any]] = {
        Op.NORM: NativeRMSNorm,
        Op.LINEAR: lambda linear: NativeLinear(packed(linear)),
        Op.LAYER: NativeParts().layer,
        Op.STACK: native_stack,
        Op.DRAFT_INPUT: NativeDraftInput,
        Op.HEAD_LAYER: native_head_layer,
        Op.LIKELIEST: NativeLikeliest,
    }
    functions: dict[Op, Callable[..., Any]] = {
        **NATIVE_FUNCTIONS,
        Op.ATTENTION: NativeAttention,
        Op.CHAIN_AT_ONCE: native_chain,
    }
    return KernelSet(functions, parts, MAX_ROWS)
