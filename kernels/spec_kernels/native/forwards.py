"""Several parts of a model in one call of kernels=native: all layers of a target, or the parts of draft steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_kernels.native.build import library
from spec_kernels.native.compiled import check, describe_keys
from spec_kernels.native.parts import LayerStructure, NativeLayer, NativeNorm, NativeProduct, NormStructure
from spec_kernels.operators import cpu_operator


class NativeLayers:
    """A sequence of layers, as the C code reads them.

    Attributes:
        address: the address of the array of their addresses, which operators take.
    """

    __slots__ = ("_layers", "address", "addresses")

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self._layers = tuple(layers)
        self.addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        self.address = ctypes.addressof(self.addresses)

    def __len__(self) -> int:
        return len(self._layers)


class _DraftLayer(ctypes.Structure):
    _fields_ = (
        ("layer", LayerStructure),
        ("embedding_norm", NormStructure),
        ("hidden_norm", NormStructure),
        ("embedding", ctypes.c_void_p),
        ("residual_is_normed", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class DraftLayerParts:
    """The parts of a draft head: its input, and a layer without a first norm.

    Attributes:
        embedding: [vocabulary, hidden_size].
        residual_is_normed: the layer's residual stream is the hidden state after its norm, not before.
    """

    layer: NativeLayer
    embedding_norm: NativeNorm
    hidden_norm: NativeNorm
    embedding: torch.Tensor
    residual_is_normed: bool


class NativeDraftLayer:
    """A draft head's layer, as the C code reads it.

    Attributes:
        address: the address of its description, which operators take.
    """

    __slots__ = ("_parts", "address", "described")

    def __init__(self, parts: DraftLayerParts) -> None:
        self._parts = parts
        assert parts.embedding.dtype is torch.float32 and parts.embedding.is_contiguous()
        self.described = _DraftLayer(
            parts.layer.described,
            parts.embedding_norm.described,
            parts.hidden_norm.described,
            parts.embedding.data_ptr(),
            parts.residual_is_normed,
        )
        self.address = ctypes.addressof(self.described)


@dataclass(frozen=True, slots=True)
class NativeHead:
    """A head that finds the likeliest token, as the C code reads it.

    Attributes:
        norm: the norm before `product`; it has no weight if rows are already normed.
        token_map: [outputs of the product] target ids; None if the head's ids are target ids.
    """

    norm: NativeNorm
    product: NativeProduct
    token_map: torch.Tensor | None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, int, int]:
        """The map and the addresses, in the order in which operators take them."""
        return self.token_map, self.norm.address, self.product.address


def _place_in_table(table: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, num_queries: int) -> Any:
    """Describe the places of rows whose rotation is in a table [positions, 2, rotary_dim], but not which rows."""
    assert table.dtype is torch.float32 and table.is_contiguous()
    place, rotary_dim = describe_keys(pages, lengths, num_queries), table.shape[2]
    place.cos, place.rotary_stride = table.data_ptr(), 2 * rotary_dim
    place.signed_sin = place.cos + rotary_dim * table.element_size()
    return place


def _place_rows(place: Any, positions: torch.Tensor, slots: torch.Tensor) -> int:
    """Set the rows' positions in the table and their slots, and return the place's address."""
    assert all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in (positions, slots))
    place.positions, place.slots = positions.data_ptr(), slots.data_ptr()
    return ctypes.addressof(place)


@cpu_operator("native_layers", mutates_args=("streams", "kv"))
def decoder_layers(
    streams: torch.Tensor,
    kv: torch.Tensor,
    stream: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    num_queries: int,
    layers: int,
) -> None:
    """Run decoder layers one after another.

    Args:
        streams: [layers, rows, hidden_size], written: the output of each layer.
        kv: [layers, cache slots, 2, num_kv_heads, head_dim], written at `slots`.
        stream: [rows, hidden_size] the input of the first layer, `num_queries` rows for each request.
        table: [positions, 2, rotary_dim] cosines and signed sines.
        positions: [rows] int64, indices into the table.
        slots: [rows] int64.
        pages: [requests, num_pages] int64, pages of the keys.
        lengths: [requests] int64, number of keys of each request up to its last row.
        layers: `NativeLayers.address`.
    """
    place = _place_in_table(table, pages, lengths, num_queries)
    at, num_layers, num_rows = _place_rows(place, positions, slots), streams.shape[0], stream.shape[0]
    check(library().native_layers(layers, num_layers, at, streams, kv.data_ptr(), kv.stride(0), stream, num_rows))


@cpu_operator("native_draft_layer", mutates_args=("out", "kv"))
def draft_layer(
    out: torch.Tensor,
    kv: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    live: torch.Tensor | None,
    num_queries: int,
    all_attend: bool,
    layer: int,
) -> None:
    """Run a draft head on tokens [rows] and hidden states [rows, hidden_size], and write `out` [live rows,
    hidden_size].

    `layer` is `NativeDraftLayer.address`. The rest is as in `part_operators.decoder_layer`, with the rotations as in
    `decoder_layers`.
    """
    place = _place_in_table(table, pages, lengths, num_queries)
    at, sizes = _place_rows(place, positions, slots), (tokens.shape[0], out.shape[0], all_attend)
    check(library().native_draft_layer(layer, at, out, kv, tokens, hidden, live, *sizes))


@cpu_operator("native_draft_start", mutates_args=("places", "hiddens", "kv"))
def draft_start(
    places: torch.Tensor,
    hiddens: torch.Tensor,
    kv: torch.Tensor,
    features: torch.Tensor,
    tokens: torch.Tensor,
    kv_lens: torch.Tensor,
    num_emitted: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    is_pruned: bool,
    all_attend: bool,
    layer: int,
    fuse: int,
    token_map: torch.Tensor | None,
    norm: int,
    head: int,
) -> None:
    """Run a catch-up step and pick the first drafts: `catchup_places`, a product, `draft_layer` and `likeliest` in one
    call.

    Args:
        places: int64, written: the output of `catchup_places`, then the drafts [requests].
        hiddens: [requests + rows, hidden_size], or without `is_pruned` [requests + 2 * rows, hidden_size], written:
            the layer's output for the live rows, the output of `fuse`, and without `is_pruned` the layer's output for
            all rows.
        features: [rows, inputs of `fuse`]; `fuse` is a `NativeProduct.address`.
        tokens: [requests, num_rows] int64, the emitted tokens.
        kv_lens: [requests], the committed length L of each request.
        num_emitted: [requests], the number of tokens that each request emitted.
        is_pruned: only the live rows go on behind attention.
        all_attend: all rows attend.
        layer: `NativeDraftLayer.address`; the rest is as in `draft_steps`.
    """
    keys = _place_in_table(table, pages, kv_lens, 1)
    parts = layer, fuse, norm, head, token_map, ctypes.addressof(keys)
    sizes = *tokens.shape, table.shape[0], is_pruned, all_attend
    check(library().native_draft_start(*parts, places, hiddens, kv, features, tokens, kv_lens, num_emitted, *sizes))


@cpu_operator("native_draft_steps", mutates_args=("drafts", "hiddens", "kv", "positions", "slots", "lengths"))
def draft_steps(
    drafts: torch.Tensor,
    hiddens: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    token_map: torch.Tensor | None,
    norm: int,
    head: int,
) -> None:
    """Run the steps of a greedy chain after its first draft; each is a `draft_layer` and a `likeliest`.

    Args:
        drafts: [drafts, requests] int64, written: `tokens` and the drafts after them.
        hiddens: [drafts - 1, requests, hidden_size], written: the layer's output in each step.
        positions: [requests] of the newest rows, advanced by one before each step; `slots` and `lengths` likewise.
        tokens: [requests] the first drafts.
        hidden: [requests, hidden_size] the outputs from which these were picked.
        norm: `NativeNorm.address`, before `head`, a `NativeProduct.address`; `layer` is a `NativeDraftLayer.address`.
    """
    place = _place_in_table(table, pages, lengths, 1)
    parts = layer, norm, head, token_map, _place_rows(place, positions, slots)
    rows = positions, slots, lengths, drafts, hiddens, tokens, hidden, kv
    check(library().native_draft_steps(*parts, *rows, drafts.shape[1], drafts.shape[0], table.shape[0]))
