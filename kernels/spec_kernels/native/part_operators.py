"""The operators of kernels=native that run a single part of a model; `forwards` has those that run several."""

from __future__ import annotations

import ctypes

import torch

from spec_kernels.native.build import library
from spec_kernels.native.compiled import check, describe_keys
from spec_kernels.operators import cpu_operator


@cpu_operator("native_layer", mutates_args=("out", "kv"))
def decoder_layer(
    out: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    residual: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    live: torch.Tensor | None,
    num_queries: int,
    all_attend: bool,
    layer: int,
) -> None:
    """Run a whole decoder layer.

    Args:
        out: [live rows, hidden_size], written.
        kv: [cache slots, 2, num_kv_heads, head_dim], written at `slots`.
        rows: [rows, in_features]: the residual stream, or the input of `qkv` if the layer has no first norm.
        residual: [live rows, hidden_size] the residual stream.
        cos: [rows, ..., rotary_dim]; `signed_sin` likewise.
        slots: [rows] int64.
        pages: [requests, num_pages] int64, pages of the keys; keys past the last column are not read.
        lengths: [requests] int64, number of keys of each request up to its last row that attends.
        live: [live rows] int64, the rows that go on; None for all, or for none if `out` has no rows.
        num_queries: rows of each request that attend.
        all_attend: other rows are dropped behind attention, not before it.
        layer: `NativeLayer.address`.
    """
    place = describe_keys(pages, lengths, num_queries)
    assert cos.stride(0) == signed_sin.stride(0) and cos.stride(-1) == signed_sin.stride(-1) == 1
    assert slots.is_contiguous()
    place.cos, place.signed_sin, place.rotary_stride = cos.data_ptr(), signed_sin.data_ptr(), cos.stride(0)
    place.slots, at = slots.data_ptr(), ctypes.addressof(place)
    sizes = rows.shape[0], out.shape[0], all_attend
    check(library().native_layer(layer, at, out, kv, rows, residual, live, *sizes))


@cpu_operator("native_norm", mutates_args=("out",))
def rms_norm(out: torch.Tensor, rows: torch.Tensor, norm: int) -> None:
    """Norm rows; `norm` is `NativeNorm.address`."""
    library().native_norm(norm, out, rows, rows.shape[1], rows.shape[0])


@cpu_operator("native_product", mutates_args=("out",))
def multiply(out: torch.Tensor, rows: torch.Tensor, product: int) -> None:
    """Multiply rows by a weight; `product` is `NativeProduct.address`."""
    check(library().native_product(product, out, rows, rows.shape[0]))


@cpu_operator("native_likeliest", mutates_args=("tokens",))
def likeliest(tokens: torch.Tensor, rows: torch.Tensor, token_map: torch.Tensor | None, norm: int, head: int) -> None:
    """Write the argmax of `head`'s product with each row, normed if `norm` has a weight; ties go to the lowest id in
    the head."""
    check(library().native_likeliest(head, norm, token_map, tokens, rows, rows.shape[0]))


@cpu_operator("native_draft_input", mutates_args=("out",))
def draft_input(
    out: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    embedding: torch.Tensor,
    embedding_norm: int,
    hidden_norm: int,
) -> None:
    """Write the normed embeddings of tokens, concatenated with normed hidden states, to `out` [rows, 2 *
    hidden_size]."""
    num_rows, size = hidden.shape
    library().native_draft_input(embedding_norm, hidden_norm, embedding, size, out, tokens, hidden, num_rows)
