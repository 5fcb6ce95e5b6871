"""Writing K and V into the paged cache: as they are, or together with the rotation that precedes it.

The fused kernel is what a "prewrite" attention step needs: K and V of all rows are in the cache, and the roped queries
in a tensor of their own, before attention drops the rows nobody reads.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.utils import assert_rows_of, launch_on

_PAIR_TILE = 16


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
    tl.store(kv_ptrs, tl.load(key_ptrs, mask=is_entry), mask=is_entry)
    tl.store(kv_ptrs + NUM_KV_HEADS * HEAD_DIM, tl.load(value_ptrs, mask=is_entry), mask=is_entry)


@torch.library.custom_op("spec_kernels::write_kv", mutates_args=("kv",))
def write_kv(kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write row i of keys and values to cache slot `slot_mapping[i]`. Of rows that share a slot, any one stays.

    Args:
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, written.
        keys: [rows, num_kv_heads, head_dim], of the cache's dtype.
        values: the same.
        slot_mapping: [rows] int64.
    """
    num_rows, num_kv_heads, head_dim = keys.shape
    assert_rows_of(keys, num_rows, num_kv_heads, head_dim)
    assert_rows_of(values, num_rows, num_kv_heads, head_dim)
    assert_rows_of(kv, kv.shape[0], 2, num_kv_heads, head_dim)
    assert_rows_of(slot_mapping, num_rows)
    assert kv.is_contiguous() and keys.dtype == values.dtype == kv.dtype
    with launch_on(kv):
        _write_kv[(triton.cdiv(num_rows * num_kv_heads, _PAIR_TILE),)](
            *(kv, keys, values, slot_mapping, num_rows),
            *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), kv.stride(0)),
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PAIR_TILE=_PAIR_TILE,
            CHANNEL_TILE=triton.next_power_of_2(head_dim),
        )


def write_kv_reference(kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Do what `write_kv` does."""
    kv.index_copy_(0, slot_mapping, torch.stack((keys, values), dim=1))


@triton.jit
def _weighted(normed: tl.tensor, weight: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round before and after the weight, as the models' norms do."""
    rounded = normed.to(like.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(like.dtype).to(tl.float32)


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
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    NORMED: tl.constexpr,
) -> None:
    """Norms, rotates and writes PAIR_TILE (row, head) pairs. Key heads come before value heads: in `qkv` and in a
    cache slot alike."""
    NUM_QKV_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    pairs = tl.program_id(0) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    channels = tl.arange(0, HALF_TILE)[None, :]
    row = (pairs // NUM_QKV_HEADS).to(tl.int64)
    head = pairs % NUM_QKV_HEADS
    is_pair = row < num_rows
    is_entry = is_pair[:, None] & (channels < HALF)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]

    source = qkv_ptr + (row * qkv_row_stride + head * (2 * HALF))[:, None] + channels
    left_in = tl.load(source, mask=is_entry, other=0.0)
    right_in = tl.load(source + HALF, mask=is_entry, other=0.0)
    cos_ptrs = cos_ptr + (row * cos_row_stride)[:, None] + channels
    sin_ptrs = signed_sin_ptr + (row * sin_row_stride)[:, None] + channels
    left_cos = tl.load(cos_ptrs, mask=is_entry, other=0.0).to(tl.float32)
    right_cos = tl.load(cos_ptrs + HALF, mask=is_entry, other=0.0).to(tl.float32)
    left_sin = tl.load(sin_ptrs, mask=is_entry, other=0.0).to(tl.float32)
    right_sin = tl.load(sin_ptrs + HALF, mask=is_entry, other=0.0).to(tl.float32)
    left, right = left_in.to(tl.float32), right_in.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(left * left + right * right, 1) / (2 * HALF) + eps)[:, None]
        norm_ptrs = norm_ptr + (head * (2 * HALF))[:, None] + channels
        is_normed = is_entry & (~is_value)
        left = _weighted(left * scale, tl.load(norm_ptrs, mask=is_normed, other=0.0), left_in)
        right = _weighted(right * scale, tl.load(norm_ptrs + HALF, mask=is_normed, other=0.0), right_in)
    left_out = (left * left_cos + right * left_sin).to(left_in.dtype)
    right_out = (right * right_cos + left * right_sin).to(right_in.dtype)
    left_out = tl.where(is_value, left_in, left_out)
    right_out = tl.where(is_value, right_in, right_out)

    query_ptrs = queries_ptr + ((row * NUM_HEADS + head) * (2 * HALF))[:, None] + channels
    tl.store(query_ptrs, left_out, mask=is_entry & is_query)
    tl.store(query_ptrs + HALF, right_out, mask=is_entry & is_query)
    slot = tl.load(slot_mapping_ptr + row, mask=is_pair, other=0)
    kv_ptrs = kv_ptr + (slot * slot_stride + (head - NUM_HEADS) * (2 * HALF))[:, None] + channels
    tl.store(kv_ptrs, left_out, mask=is_entry & (~is_query))
    tl.store(kv_ptrs + HALF, right_out, mask=is_entry & (~is_query))


@torch.library.custom_op("spec_kernels::rope_write", mutates_args=("queries", "kv"))
def rope_write(
    queries: torch.Tensor,
    kv: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries and keys (rotate-half layout, in float32, rounded once), write K and V to `slot_mapping`.

    Args:
        queries: [rows, num_heads, head_dim], contiguous, written: the roped queries.
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, written.
        qkv: [rows, num_heads + 2 * num_kv_heads, head_dim] after the projection: query, key, value heads.
        cos: [rows, head_dim] of each row's position.
        signed_sin: [rows, head_dim], the sine negated in its first half.
        slot_mapping: [rows] int64.
        norm_weight: [num_heads + num_kv_heads, head_dim] of an RMSNorm of each head before its rotation, with `eps`.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = kv.shape[2]
    num_qkv_heads = num_heads + 2 * num_kv_heads
    assert_rows_of(qkv, num_rows, num_qkv_heads, head_dim)
    assert_rows_of(kv, kv.shape[0], 2, num_kv_heads, head_dim)
    assert_rows_of(cos, num_rows, head_dim)
    assert_rows_of(signed_sin, num_rows, head_dim)
    assert_rows_of(slot_mapping, num_rows)
    assert queries.is_contiguous() and kv.is_contiguous() and qkv.stride(1) == head_dim
    if norm_weight is not None:
        assert_rows_of(norm_weight, num_heads + num_kv_heads, head_dim)
        assert norm_weight.is_contiguous()
    assert queries.dtype == qkv.dtype == kv.dtype and head_dim % 2 == 0
    with launch_on(kv):
        _rope_write[(triton.cdiv(num_rows * num_qkv_heads, _PAIR_TILE),)](
            *(queries, kv, qkv, cos, signed_sin, slot_mapping, queries if norm_weight is None else norm_weight),
            *(num_rows, qkv.stride(0), cos.stride(0), signed_sin.stride(0), kv.stride(0), eps),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            PAIR_TILE=_PAIR_TILE,
            HALF_TILE=triton.next_power_of_2(head_dim // 2),
            NORMED=norm_weight is not None,
        )


def rope_write_reference(
    queries: torch.Tensor,
    kv: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Do what `rope_write` does."""
    num_heads, num_kv_heads, head_dim = queries.shape[1], kv.shape[2], kv.shape[3]
    heads, values = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    if norm_weight is not None:
        heads = torch.nn.functional.rms_norm(heads, (head_dim,), None, eps) * norm_weight
    heads = heads.float()
    swapped = heads.roll(head_dim // 2, -1)
    roped = (heads * cos.float().unsqueeze(1) + swapped * signed_sin.float().unsqueeze(1)).to(qkv.dtype)
    queries.copy_(roped[:, :num_heads])
    write_kv_reference(kv, roped[:, num_heads:], values, slot_mapping)
