"""The operators of kernels=native that run a single part of a model; `forwards` has those that run several."""

from __future__ import annotations

import ctypes

import torch

from spec_kernels.native.build import library
from spec_kernels.native.compiled import check, describe_place, float_rows, pointer_to
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
    layer: int,
) -> None:
    """Run a whole decoder layer.

    Args:
        out: [live rows, hidden_size], written.
        kv: [cache slots, 2, num_kv_heads, head_dim], written at `slots`.
        rows: [rows, in_features]: the residual stream, or the input of `qkv` if the layer has no first norm. Without
            `live`, each request has `num_queries` rows.
        residual: [live rows, hidden_size] the residual stream.
        cos: [rows, ..., rotary_dim]; `signed_sin` likewise.
        slots: [rows] int64.
        pages: [requests, num_pages] int64, pages of the keys; keys past the last column are not read.
        lengths: [requests] int64, number of keys of each request up to its last live row.
        live: [live rows] int64, the rows that attend and go on, `num_queries` for each request; None for all.
        layer: `NativeLayer.address`.
    """
    place = describe_place((cos, signed_sin), slots, (pages, lengths, num_queries))
    check(
        library().native_layer(
            layer,
            ctypes.addressof(place),
            out.data_ptr(),
            kv.data_ptr(),
            float_rows(rows),
            float_rows(residual),
            pointer_to(live),
            rows.shape[0],
            out.shape[0],
        )
    )


@cpu_operator("native_project", mutates_args=("heads", "kv"))
def project(
    heads: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
) -> None:
    """Run the first part of a layer, up to its KV write. Each row of `heads` [rows, all heads * head_dim] begins with
    the queries."""
    place = describe_place((cos, signed_sin), slots, None)
    check(
        library().native_project(
            layer, ctypes.addressof(place), heads.data_ptr(), kv.data_ptr(), float_rows(rows), rows.shape[0]
        )
    )


@cpu_operator("native_attend", mutates_args=("out",))
def attend(
    out: torch.Tensor,
    kv: torch.Tensor,
    queries: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    num_queries: int,
    layer: int,
) -> None:
    """Run the second part: attend with `queries` [rows, heads * head_dim or more], and write `out` [rows, heads *
    head_dim]."""
    assert queries.stride(1) == 1
    place = describe_place(None, None, (pages, lengths, num_queries))
    check(
        library().native_attend(
            layer,
            ctypes.addressof(place),
            out.data_ptr(),
            kv.data_ptr(),
            queries.data_ptr(),
            queries.stride(0),
            queries.shape[0],
        )
    )


@cpu_operator("native_finish", mutates_args=("out",))
def finish(out: torch.Tensor, attended: torch.Tensor, residual: torch.Tensor, layer: int) -> None:
    """Run the last part: from attention's output and the layer's input stream, write `out` [rows, hidden_size]."""
    check(library().native_finish(layer, out.data_ptr(), float_rows(attended), float_rows(residual), residual.shape[0]))


@cpu_operator("native_norm", mutates_args=("out",))
def rms_norm(out: torch.Tensor, rows: torch.Tensor, norm: int) -> None:
    """Norm rows; `norm` is `NativeNorm.address`."""
    library().native_norm(norm, out.data_ptr(), float_rows(rows), rows.shape[1], rows.shape[0])


@cpu_operator("native_product", mutates_args=("out",))
def multiply(out: torch.Tensor, rows: torch.Tensor, product: int) -> None:
    """Multiply rows by a weight; `product` is `NativeProduct.address`."""
    check(library().native_product(product, out.data_ptr(), float_rows(rows), rows.shape[0]))


@cpu_operator("native_likeliest", mutates_args=("tokens",))
def likeliest(tokens: torch.Tensor, rows: torch.Tensor, token_map: torch.Tensor | None, norm: int, head: int) -> None:
    """Write the argmax of `head`'s product with each row, normed if `norm` has a weight; ties go to the lowest id in
    the head."""
    check(
        library().native_likeliest(
            head, norm, pointer_to(token_map), tokens.data_ptr(), float_rows(rows), rows.shape[0]
        )
    )


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
    assert tokens.is_contiguous() and embedding.is_contiguous()
    num_rows, size = hidden.shape
    library().native_draft_input(
        embedding_norm,
        hidden_norm,
        float_rows(embedding),
        size,
        out.data_ptr(),
        tokens.data_ptr(),
        float_rows(hidden),
        num_rows,
    )
