"""Norms, rotates and writes the cache rows of latent attention (MLA), and rotates its queries.

It corresponds to the fused RoPE and cache write of `rope_write.py`, for a row that all heads share.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_HEADS_AT_ONCE = 16


class Latents(NamedTuple):
    """Pointers to the cache, and to what a row of it is made of."""

    cache: tl.tensor
    projected: tl.tensor
    norm_weight: tl.tensor
    cos: tl.tensor
    signed_sin: tl.tensor
    slot_mapping: tl.tensor


@triton.jit
def write_row(
    of: Latents,
    row: tl.tensor,
    eps: tl.tensor,
    projected_stride: tl.tensor,
    turn_stride: tl.tensor,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Norms the latent numbers of one row, rotates its key, and writes both to its slot."""
    channels = tl.arange(0, RANK_TILE)
    is_channel = channels < RANK
    source = of.projected + row * projected_stride
    target = of.cache + tl.load(of.slot_mapping + row) * (RANK + 2 * HALF)
    latents = tl.load(source + channels, mask=is_channel, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latents * latents, 0) / RANK + eps)
    weight = tl.load(of.norm_weight + channels, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(target + channels, (latents * scale * weight).to(of.cache.dtype.element_ty), mask=is_channel)

    half = tl.arange(0, HALF_TILE)
    is_half = half < HALF
    first = tl.load(source + RANK + half, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(source + RANK + HALF + half, mask=is_half, other=0.0).to(tl.float32)
    turns = row * turn_stride + half
    first_cos = tl.load(of.cos + turns, mask=is_half, other=0.0).to(tl.float32)
    second_cos = tl.load(of.cos + turns + HALF, mask=is_half, other=0.0).to(tl.float32)
    first_sin = tl.load(of.signed_sin + turns, mask=is_half, other=0.0).to(tl.float32)
    second_sin = tl.load(of.signed_sin + turns + HALF, mask=is_half, other=0.0).to(tl.float32)
    turned = first * first_cos + second * first_sin
    tl.store(target + RANK + half, turned.to(of.cache.dtype.element_ty), mask=is_half)
    turned = second * second_cos + first * second_sin
    tl.store(target + RANK + HALF + half, turned.to(of.cache.dtype.element_ty), mask=is_half)


@triton.jit
def _write_rows(
    cache_ptr: tl.tensor,
    projected_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    signed_sin_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    eps: tl.tensor,
    projected_stride: tl.tensor,
    turn_stride: tl.tensor,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Writes one row."""
    of = Latents(cache_ptr, projected_ptr, norm_weight_ptr, cos_ptr, signed_sin_ptr, slot_mapping_ptr)
    row = tl.program_id(0).to(tl.int64)
    write_row(of, row, eps, projected_stride, turn_stride, RANK, HALF, RANK_TILE, HALF_TILE)


@triton.jit
def _turn_queries(
    queries_ptr: tl.tensor,
    heads_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    signed_sin_ptr: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    head_row_stride: tl.tensor,
    head_stride: tl.tensor,
    turn_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Rotates the last channels of some heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    half = tl.arange(0, HALF_TILE)
    is_half = half < HALF
    is_there = (heads < NUM_HEADS)[:, None] & is_half[None, :]
    sources = heads_ptr + row * head_row_stride + heads[:, None] * head_stride + half[None, :]
    targets = queries_ptr + row * query_row_stride + heads[:, None] * query_head_stride + half[None, :]
    first = tl.load(sources, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(sources + HALF, mask=is_there, other=0.0).to(tl.float32)
    turns = row * turn_stride + half
    first_cos = tl.load(cos_ptr + turns, mask=is_half, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos_ptr + turns + HALF, mask=is_half, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(signed_sin_ptr + turns, mask=is_half, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(signed_sin_ptr + turns + HALF, mask=is_half, other=0.0).to(tl.float32)[None, :]
    dtype = queries_ptr.dtype.element_ty
    tl.store(targets, (first * first_cos + second * first_sin).to(dtype), mask=is_there)
    tl.store(targets + HALF, (second * second_cos + first * second_sin).to(dtype), mask=is_there)


@operator("write_latents", mutates_args=("cache",))
def write_latents(
    cache: torch.Tensor,
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float,
) -> None:
    """Write row i of `projected` to cache slot `slot_mapping[i]`, with normed latent numbers and a rotated key.

    If rows share a slot, each number in it is from any one of them.

    Args:
        cache: [num_slots, row_width], contiguous, written.
        projected: [rows, row_width] of any row stride: latent numbers, then the key.
        norm_weight: [value_width], one for each latent number.
        cos: [rows, rotated], contiguous; `rotated` is the width of the key.
        signed_sin: [rows, rotated], contiguous, negated in its first half.
        slot_mapping: [rows] int64.
        eps: of the norm.
    """
    num_rows, row_width = projected.shape
    rank, rotated = norm_weight.shape[0], cos.shape[1]
    assert_rows_of(cache, cache.shape[0], row_width)
    assert_rows_of(projected, num_rows, row_width)
    assert cache.is_contiguous() and rank + rotated == row_width and cos.stride() == signed_sin.stride()
    with launch_on(cache):
        _write_rows[(num_rows,)](
            cache,
            projected,
            norm_weight,
            cos,
            signed_sin,
            slot_mapping,
            eps,
            projected.stride(0),
            cos.stride(0),
            RANK=rank,
            HALF=rotated // 2,
            RANK_TILE=triton.next_power_of_2(rank),
            HALF_TILE=triton.next_power_of_2(rotated // 2),
        )


@operator("turn_queries", mutates_args=("queries",))
def turn_queries(queries: torch.Tensor, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate the last channels of `heads`, and write them to the last channels of `queries`; others are not written.

    Args:
        queries: [rows, num_heads, row_width], written in part; it may be `heads`.
        heads: [rows, num_heads, query_width], of any stride but that of the last dimension, which is 1.
        cos: [rows, rotated]; `rotated` is the number of rotated channels.
        signed_sin: [rows, rotated], negated in its first half.
    """
    num_rows, num_heads, row_width = queries.shape
    query_width, rotated = heads.shape[2], cos.shape[1]
    assert_rows_of(heads, num_rows, num_heads, query_width)
    assert_rows_of(cos, num_rows, rotated)
    assert queries.stride(2) == 1 and cos.stride() == signed_sin.stride()
    with launch_on(queries):
        _turn_queries[(num_rows, triton.cdiv(num_heads, _HEADS_AT_ONCE))](
            queries[..., row_width - rotated :],
            heads[..., query_width - rotated :],
            cos,
            signed_sin,
            queries.stride(0),
            queries.stride(1),
            heads.stride(0),
            heads.stride(1),
            cos.stride(0),
            NUM_HEADS=num_heads,
            HALF=rotated // 2,
            HEAD_TILE=_HEADS_AT_ONCE,
            HALF_TILE=triton.next_power_of_2(rotated // 2),
        )
