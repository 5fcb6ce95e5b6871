"""The gated delta rule over a prompt's rows in chunks, as products over all rows of a chunk.

Let D_i be the decay from a chunk's start to row i. The state after row i is D_i S + sum over j <= i of D_i / D_j *
key_j x u_j, with u_i = strength_i * (value_i - S_i^T key_i). S_i is the decayed state before row i, so u_i depends on
all u_j before it. This is a triangular system, whose inverse does not depend on S (the UT transform of Yang et al.
2024, arXiv 2406.06484; flash-linear-attention has it in chunks of 64). So one launch inverts the systems of all chunks
in parallel, and a second one goes through the chunks with a tile of the state.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.delta_rule import empty_outputs
from spec_kernels.operators import operator
from spec_kernels.utils import launch_on

CHUNK = 64
"""Rows of a chunk. A prompt has the same bits wherever it is cut, if all cuts are at multiples of this."""
SYSTEM_WARPS, VALUE_TILE, CHUNK_WARPS, STAGES = 4, 32, 4, 2
"""Another stage of prefetched chunks would not fit shared memory."""


@triton.jit
def _dot(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """A tensor core product in TF32, which rounds its factors to a 10-bit mantissa (bfloat16 has 7)."""
    return tl.dot(left, right, input_precision="tf32")


@triton.jit
def _exact_dot(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """A product nearly as exact as float32, made of three tensor core products."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _inverse(system: tl.tensor, rows: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Return (I + L)^-1 of a strictly lower triangular L [CHUNK, CHUNK].

    Split L = B + R, where B has the blocks of 8 rows on the diagonal. Since B^8 = 0, (I + B)^-1 = (I - B)(I + B^2)(I +
    B^4). Let M = (I + B)^-1 R. M^(CHUNK / 8) = 0, so (I + M)^-1 is a product of the same form, and (I + L)^-1 = (I +
    M)^-1 (I + B)^-1. Powers of the whole L can grow so large that their sum does not cancel in float32.
    """
    is_same_block = (rows // 8)[:, None] == (rows // 8)[None, :]
    inner = -tl.where(is_same_block, system, 0.0)
    one = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    square = _exact_dot(inner, inner)
    inverse = one + inner + square + _exact_dot(inner, square)
    fourth = _exact_dot(square, square)
    inverse += _exact_dot(inverse, fourth)
    outer = -_exact_dot(inverse, tl.where(is_same_block, 0.0, system))
    power = outer
    for _ in tl.static_range(3 if CHUNK == 64 else 2):
        inverse += _exact_dot(power, inverse)
        power = _exact_dot(power, power)
    return inverse


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _invert_systems(
    systems_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    log_decay_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_chunks: tl.tensor,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Writes, for one chunk of one head, the inverse of its system and the weights of each u_j in its outputs."""
    CONV_SIZE: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    chunk, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    is_row = chunk * CHUNK + rows < num_rows
    is_key = is_row[:, None] & (keys < KEY_DIM)[None, :]
    first = request * num_rows + chunk * CHUNK
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    query_ptrs = mixed_ptr + ((first + rows) * CONV_SIZE)[:, None] + (key_head * KEY_DIM + keys)[None, :]
    key = tl.load(query_ptrs + NUM_KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)
    gates = (first + rows) * NUM_VALUE_HEADS + head
    decay = tl.cumsum(tl.load(log_decay_ptr + gates, mask=is_row, other=0.0))
    strength = tl.load(strength_ptr + gates, mask=is_row, other=0.0)
    is_seen = rows[:, None] >= rows[None, :]
    between = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], float("-inf")))
    turned = tl.trans(key)
    entries = ((request * NUM_VALUE_HEADS + head) * num_chunks + chunk) * CHUNK * CHUNK
    entries += (rows * CHUNK)[:, None] + rows[None, :]
    query = tl.load(query_ptrs, mask=is_key, other=0.0)
    tl.store(reads_ptr + entries, between * _dot(query, turned))
    is_before = rows[:, None] > rows[None, :]
    system = tl.where(is_before, strength[:, None] * between * _dot(key, turned), 0.0)
    tl.store(systems_ptr + entries, _inverse(system, rows, CHUNK))


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "rows_kept"])
def _walk_chunks(
    out_ptr: tl.tensor,
    states_ptr: tl.tensor,
    systems_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    log_decay_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    committed_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_chunks: tl.tensor,
    rows_kept: tl.tensor,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Runs all chunks of one request for VALUE_TILE channels of one value head."""
    CONV_SIZE: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    STATE_SIZE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    values = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    is_state = is_key[:, None] & is_value[None, :]
    slot, committed = tl.load(slot_ids_ptr + request), tl.load(committed_ptr + request)
    states_ptr += slot * rows_kept * STATE_SIZE + head * KEY_DIM * VALUE_DIM
    own = keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(states_ptr + committed * STATE_SIZE + own, mask=is_state, other=0.0)
    first = request * num_rows
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    entries = (request * NUM_VALUE_HEADS + head) * num_chunks * CHUNK * CHUNK
    entries += (rows * CHUNK)[:, None] + rows[None, :]
    for begin in range(0, num_chunks * CHUNK, CHUNK):
        is_row = begin + rows < num_rows
        place = first + begin + rows
        is_entry = is_row[:, None] & is_key[None, :]
        is_output = is_row[:, None] & is_value[None, :]
        row_ptrs = mixed_ptr + (place * CONV_SIZE)[:, None]
        query_ptrs = row_ptrs + (key_head * KEY_DIM + keys)[None, :]
        gates = place * NUM_VALUE_HEADS + head
        log_decay = tl.load(log_decay_ptr + gates, mask=is_row, other=0.0)
        decay, whole = tl.cumsum(log_decay), tl.sum(log_decay)
        from_start = tl.exp(decay)[:, None]

        key = tl.load(query_ptrs + NUM_KEY_HEADS * KEY_DIM, mask=is_entry, other=0.0)
        value_ptrs = row_ptrs + (2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + values)[None, :]
        value = tl.load(value_ptrs, mask=is_output, other=0.0)
        strength = tl.load(strength_ptr + gates, mask=is_row, other=0.0)
        missed = strength[:, None] * (value - from_start * _dot(key, state))
        updates = _dot(tl.load(systems_ptr + entries), missed)
        query = tl.load(query_ptrs, mask=is_entry, other=0.0)
        output = from_start * _dot(query, state) + _dot(tl.load(reads_ptr + entries), updates)
        tl.store(out_ptr + (gates * VALUE_DIM)[:, None] + values[None, :], output, mask=is_output)
        to_end = tl.exp(tl.minimum(whole - decay, 0.0))[:, None]
        state = state * tl.exp(whole) + _dot(tl.trans(key * to_end), updates)
        entries += CHUNK * CHUNK
    tl.store(states_ptr + own, state, mask=is_state)


@operator("delta_chunks", mutates_args=("states",))
def delta_chunks(
    states: torch.Tensor,
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    slot_ids: torch.Tensor,
    committed: torch.Tensor,
    num_key_heads: int,
) -> torch.Tensor:
    """Run the prompt rows of each request from the state at row `committed` of its slot; write the last state to row 0.

    It does the same as `delta_rule` with `is_prompt`, up to the rounding of products over chunks.

    Args:
        states: [num_slots + 1, N, num_value_heads, key_head_dim, value_head_dim] float32, written at `slot_ids`.
        mixed, log_decay, strength: as `delta_inputs` returns them.
        slot_ids, committed: [batch] int64; requests may only share the scratch slot.
    """
    out = empty_outputs(states, (mixed, log_decay, strength, slot_ids, committed))
    batch, num_rows, num_value_heads, value_head_dim = out.shape
    num_chunks, key_head_dim = triton.cdiv(num_rows, CHUNK), states.shape[-2]
    shape = (2, batch, num_value_heads, num_chunks, CHUNK, CHUNK)
    systems, reads = torch.empty(shape, dtype=torch.float32, device=out.device)
    sizes = {
        "NUM_KEY_HEADS": num_key_heads,
        "NUM_VALUE_HEADS": num_value_heads,
        "KEY_DIM": key_head_dim,
        "VALUE_DIM": value_head_dim,
        "KEY_TILE": max(16, triton.next_power_of_2(key_head_dim)),
        "CHUNK": CHUNK,
    }
    value_tile = max(16, min(VALUE_TILE, triton.next_power_of_2(value_head_dim)))
    with launch_on(states):
        _invert_systems[(num_chunks, num_value_heads, batch)](
            systems, reads, mixed, log_decay, strength, num_rows, num_chunks, **sizes, num_warps=SYSTEM_WARPS
        )
        _walk_chunks[(triton.cdiv(value_head_dim, value_tile), num_value_heads, batch)](
            out,
            states,
            systems,
            reads,
            mixed,
            log_decay,
            strength,
            slot_ids,
            committed,
            num_rows,
            num_chunks,
            states.shape[1],
            **sizes,
            VALUE_TILE=value_tile,
            num_warps=CHUNK_WARPS,
            num_stages=STAGES,
        )
    return out
