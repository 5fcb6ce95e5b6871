"""Writes K and V into the paged cache, alone or fused with norm and rotation.

The fused kernel puts K and V of all rows in the cache and the rotated queries in their own tensor. So attention can
then drop rows whose results are not read.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed_if_few, wait_behind_others
from spec_kernels.narrow_kv import narrowed, store_row
from spec_kernels.narrow_kv_reference import assert_cache_of
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, assert_whole, launch_on

_PAIR_TILE = 16
_NUMBERS_AT_ONCE = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _write_kv(
    kv_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    num_rows: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    powers_ptr: tl.tensor | None,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Writes PAIR_TILE (row, KV head) pairs."""
    pairs = tl.program_id(0) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    channels = tl.arange(0, CHANNEL_TILE)[None, :]
    row = (pairs // NUM_KV_HEADS).to(tl.int64)
    head = pairs % NUM_KV_HEADS
    is_pair = row < num_rows
    is_entry = is_pair[:, None] & (channels < HEAD_DIM)
    slot = tl.load(slot_mapping_ptr + row, mask=is_pair, other=0)
    key_ptrs = keys_ptr + (row * key_row_stride + head * key_head_stride)[:, None] + channels
    value_ptrs = values_ptr + (row * value_row_stride + head * value_head_stride)[:, None] + channels
    kv_ptrs = kv_ptr + (slot * slot_stride + head * HEAD_DIM)[:, None] + channels
    keys = tl.load(key_ptrs, mask=is_entry, other=0.0)
    values = tl.load(value_ptrs, mask=is_entry, other=0.0)
    if powers_ptr is None:
        tl.store(kv_ptrs, keys, mask=is_entry)
        tl.store(kv_ptrs + NUM_KV_HEADS * HEAD_DIM, values, mask=is_entry)
    else:
        powers_ptrs = powers_ptr + (slot * NUM_KV_HEADS + head) * 2
        store_row(kv_ptrs, powers_ptrs, keys, is_entry, is_pair)
        store_row(kv_ptrs + NUM_KV_HEADS * HEAD_DIM, powers_ptrs + 1, values, is_entry, is_pair)


@operator("write_kv", mutates_args=("kv", "powers"))
def write_kv(
    kv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    powers: torch.Tensor | None = None,
) -> None:
    """Write row i of keys and values to cache slot `slot_mapping[i]`. If rows share a slot, each number in it is from
    any one of them.

    Args:
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, written.
        keys: [rows, num_kv_heads, head_dim], of the cache's dtype.
        values: the same.
        slot_mapping: [rows] int64.
        powers: [num_slots, num_kv_heads, 2] bfloat16, contiguous, written, of a cache in e4m3; None for another.
    """
    num_rows, num_kv_heads, head_dim = keys.shape
    assert_rows_of(keys, num_rows, num_kv_heads, head_dim)
    assert_rows_of(values, num_rows, num_kv_heads, head_dim)
    assert_rows_of(kv, kv.shape[0], 2, num_kv_heads, head_dim)
    assert_rows_of(slot_mapping, num_rows)
    assert kv.is_contiguous() and keys.dtype == values.dtype
    assert_cache_of(kv, powers, keys.dtype)
    with launch_on(kv):
        _write_kv[(triton.cdiv(num_rows * num_kv_heads, _PAIR_TILE),)](
            kv,
            keys,
            values,
            slot_mapping,
            num_rows,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            kv.stride(0),
            powers,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PAIR_TILE=_PAIR_TILE,
            CHANNEL_TILE=triton.next_power_of_2(head_dim),
        )


@triton.jit
def _weighted(normed: tl.tensor, weight: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round before and after the weight, as the models' norms do. If the weight is float32 and the head is not, round
    only after it (Gemma 4, Qwen3.5)."""
    if weight.dtype == like.dtype:
        normed = normed.to(like.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(like.dtype).to(tl.float32)


@triton.jit
def turned(
    left: tl.tensor,
    right: tl.tensor,
    left_cos: tl.tensor,
    right_cos: tl.tensor,
    left_sin: tl.tensor,
    right_sin: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate float32 pairs of channels, each by its own cosine and signed sine.

    The fused multiply-add is explicit. Otherwise the compiler could round the sine's product in one kernel, and the
    cosine's in another.
    """
    return tl.fma(left, left_cos, right * left_sin), tl.fma(right, right_cos, left * right_sin)


@triton.jit(do_not_specialize=["num_rows"])
def _rope_write(
    queries_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    signed_sin_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    num_rows: tl.tensor,
    qkv_row_stride: tl.tensor,
    cos_row_stride: tl.tensor,
    sin_row_stride: tl.tensor,
    slot_stride: tl.tensor,
    powers_ptr: tl.tensor | None,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    NORMED: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Norms, rotates and writes PAIR_TILE (row, head) pairs.

    Key heads come before value heads, both in `qkv` and in a cache slot. A head has two rotated halves, followed by
    REST channels that are not rotated.
    """
    NUM_QKV_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    pairs = tl.program_id(0) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    channels = tl.arange(0, HALF_TILE)[None, :]
    still = tl.arange(0, REST_TILE)[None, :]
    row = (pairs // NUM_QKV_HEADS).to(tl.int64)
    head = pairs % NUM_QKV_HEADS
    is_pair = row < num_rows
    is_entry = is_pair[:, None] & (channels < HALF)
    is_still = is_pair[:, None] & (still < REST)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]

    # Weights, and data that no early kernel writes, can be read while the previous kernel still runs.
    cos_ptrs = cos_ptr + (row * cos_row_stride)[:, None] + channels
    sin_ptrs = signed_sin_ptr + (row * sin_row_stride)[:, None] + channels
    left_cos = tl.load(cos_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg").to(tl.float32)
    right_cos = tl.load(cos_ptrs + HALF, mask=is_entry, other=0.0, cache_modifier=".cg").to(tl.float32)
    left_sin = tl.load(sin_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg").to(tl.float32)
    right_sin = tl.load(sin_ptrs + HALF, mask=is_entry, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NUM_KV_HEADS > 0:
        slot = tl.load(slot_mapping_ptr + row, mask=is_pair, other=0, cache_modifier=".cg")
    if NORMED:
        norm_ptrs = norm_ptr + (head * HEAD_DIM)[:, None]
        left_weight = tl.load(norm_ptrs + channels, mask=is_entry & (~is_value), other=0.0)
        right_weight = tl.load(norm_ptrs + HALF + channels, mask=is_entry & (~is_value), other=0.0)
        if REST > 0:
            rest_weight = tl.load(norm_ptrs + 2 * HALF + still, mask=is_still & (~is_value), other=0.0)
    wait_behind_others(EARLY)

    source_head = head
    if KEYS_ARE_VALUES:
        source_head = tl.where(head >= NUM_HEADS + NUM_KV_HEADS, head - NUM_KV_HEADS, head)
    source = qkv_ptr + (row * qkv_row_stride + source_head * HEAD_DIM)[:, None]
    left_in = tl.load(source + channels, mask=is_entry, other=0.0)
    right_in = tl.load(source + HALF + channels, mask=is_entry, other=0.0)
    left, right = left_in.to(tl.float32), right_in.to(tl.float32)
    if REST > 0:
        rest_out = tl.load(source + 2 * HALF + still, mask=is_still, other=0.0)
    if NORMED:
        squares = tl.sum(left * left + right * right, 1)
        if REST > 0:
            rest = rest_out.to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if NORMS_VALUES:
            left_in, right_in = (left * scale).to(left_in.dtype), (right * scale).to(right_in.dtype)
        left = _weighted(left * scale, left_weight, left_in)
        right = _weighted(right * scale, right_weight, right_in)
        if REST > 0:
            rest_in = rest_out
            if NORMS_VALUES:
                rest_in = (rest * scale).to(rest_out.dtype)
            rest_out = _weighted(rest * scale, rest_weight, rest_in).to(rest_in.dtype)
            rest_out = tl.where(is_value, rest_in, rest_out)
    left_out, right_out = turned(left, right, left_cos, right_cos, left_sin, right_sin)
    left_out, right_out = left_out.to(left_in.dtype), right_out.to(right_in.dtype)
    left_out = tl.where(is_value, left_in, left_out)
    right_out = tl.where(is_value, right_in, right_out)

    query_ptrs = queries_ptr + ((row * NUM_HEADS + head) * HEAD_DIM)[:, None]
    tl.store(query_ptrs + channels, left_out, mask=is_entry & is_query)
    tl.store(query_ptrs + HALF + channels, right_out, mask=is_entry & is_query)
    if REST > 0:
        tl.store(query_ptrs + 2 * HALF + still, rest_out, mask=is_still & is_query)
    if NUM_KV_HEADS > 0:
        kv_ptrs = kv_ptr + (slot * slot_stride + (head - NUM_HEADS) * HEAD_DIM)[:, None]
        if powers_ptr is not None:
            largest = tl.maximum(tl.max(tl.abs(left_out), 1), tl.max(tl.abs(right_out), 1))
            if REST > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(rest_out), 1))
            left_out, powers = narrowed(left_out, largest)
            right_out, _ = narrowed(right_out, largest)
            if REST > 0:
                rest_out, _ = narrowed(rest_out, largest)
            kv_head, which = (head - NUM_HEADS) % NUM_KV_HEADS, (head - NUM_HEADS) // NUM_KV_HEADS
            power_ptrs = powers_ptr + (slot * NUM_KV_HEADS + kv_head) * 2 + which
            tl.store(power_ptrs, powers, mask=is_pair & (head >= NUM_HEADS))
        kept: tl.constexpr = kv_ptr.dtype.element_ty
        tl.store(kv_ptrs + channels, left_out.to(kept), mask=is_entry & (~is_query))
        tl.store(kv_ptrs + HALF + channels, right_out.to(kept), mask=is_entry & (~is_query))
        if REST > 0:
            tl.store(kv_ptrs + 2 * HALF + still, rest_out.to(kept), mask=is_still & (~is_query))


@operator("rope_write", mutates_args=("kv", "powers"))
def rope_write(
    num_heads: int,
    kv: torch.Tensor | None,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norms_values: bool = False,
    powers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys (rotate-half layout, in float32, rounded once), write K and V to `slot_mapping`.

    Returns the rotated queries [rows, num_heads, head_dim].

    Args:
        num_heads: of queries.
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, written; None if there are only queries.
        qkv: [rows, num_heads + 2 * num_kv_heads, head_dim] after the projection: query, key, value heads. Without value
            heads, the keys before norm and rotation are the values (Gemma 4).
        cos: [rows, rotary_dim] of each row's position; channels from rotary_dim on are not rotated (Qwen3.5).
        signed_sin: [rows, rotary_dim], the sine negated in its first half.
        slot_mapping: [rows] int64.
        norm_weight: [num_heads + num_kv_heads, head_dim] of an RMSNorm of each head before its rotation, with `eps`. It
            is applied and rounded as in `rms_norm`.
        norms_values: value heads are normed too, without a weight (Gemma 4).
        powers: as in `write_kv`.
    """
    num_rows, _, head_dim = qkv.shape
    num_kv_heads, rotary_dim = 0 if kv is None else kv.shape[2], cos.shape[1]
    keys_are_values = kv is not None and qkv.shape[1] == num_heads + num_kv_heads
    assert_rows_of(qkv, num_rows, num_heads + (1 if keys_are_values else 2) * num_kv_heads, head_dim)
    assert_rows_of(cos, num_rows, rotary_dim)
    assert_rows_of(signed_sin, num_rows, rotary_dim)
    assert_rows_of(slot_mapping, num_rows)
    assert qkv.stride(1) == head_dim and rotary_dim % 2 == 0
    if kv is not None:
        assert_rows_of(kv, kv.shape[0], 2, num_kv_heads, head_dim)
        assert kv.is_contiguous()
        assert_cache_of(kv, powers, qkv.dtype)
    if norm_weight is not None:
        assert_whole((norm_weight,), num_heads + num_kv_heads, head_dim)
    assert norm_weight is not None or not norms_values
    queries = qkv.new_empty(num_rows, num_heads, head_dim)
    sizes = _sizes(num_heads, num_kv_heads, head_dim, rotary_dim)
    num_programs = triton.cdiv(num_rows * (num_heads + 2 * num_kv_heads), sizes["PAIR_TILE"])
    with launch_on(queries):
        _rope_write[(num_programs,)](
            queries,
            queries if kv is None else kv,
            qkv,
            cos,
            signed_sin,
            slot_mapping,
            queries if norm_weight is None else norm_weight,
            num_rows,
            qkv.stride(0),
            cos.stride(0),
            signed_sin.stride(0),
            0 if kv is None else kv.stride(0),
            powers,
            eps,
            **sizes,
            NORMED=norm_weight is not None,
            NORMS_VALUES=norms_values,
            KEYS_ARE_VALUES=keys_are_values,
            **placed_if_few(num_programs),
        )
    return queries


@cache
def _sizes(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Return the compile-time constants of heads and tiles; they are kept, since every layer asks for them."""
    rest = head_dim - rotary_dim
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": rotary_dim // 2,
        "REST": rest,
        "PAIR_TILE": max(1, min(_PAIR_TILE, _NUMBERS_AT_ONCE // triton.next_power_of_2(head_dim))),
        "HALF_TILE": triton.next_power_of_2(rotary_dim // 2),
        "REST_TILE": triton.next_power_of_2(max(rest, 1)),
    }
