"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), row by row, over states in the slots of requests.

A program keeps a tile of one head's state in registers, and processes the rows one after another. Without replay,
verify writes the tile after every row, as in vLLM (`fused_recurrent_gated_delta_rule`). With replay, verify repeats the
rows that the last round accepted, writes the tile, and then runs its own rows without writing. A prompt writes the tile
once, at the end. All three compute a row with the same instructions.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

VALUE_TILE, NUM_WARPS, LEAST_TILE = 16, 1, 256
"""The most value channels of a program, the number of its warps, and the least size of a state's tile: two keys of four
channels a thread. A program has all channels of a key, since each row sums over them."""


@triton.jit
def _row(
    state: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    log_decay: tl.tensor,
    strength: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a row's output [VALUE_TILE] and the state [KEY_TILE, VALUE_TILE] after it."""
    state = state * tl.exp(log_decay)
    answer = tl.sum(state * key[:, None], axis=0)
    state += key[:, None] * (strength * (value - answer))[None, :]
    return tl.sum(state * query[:, None], axis=0), state


@triton.jit(do_not_specialize=["num_rows", "rows_kept", "state_every_row", "replays"])
def _delta_rule(
    out_ptr: tl.tensor,
    states_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    log_decay_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    committed_ptr: tl.tensor,
    kept_keys_ptr: tl.tensor,
    kept_values_ptr: tl.tensor,
    kept_log_decay_ptr: tl.tensor,
    kept_strength_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows_kept: tl.tensor,
    state_every_row: tl.tensor,
    replays: tl.tensor,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
) -> None:
    """Runs all rows of one request for VALUE_TILE channels of one value head.

    `rows_kept` is N, the number of states or of kept rows in a slot. Each tile of a request's state is read and written
    by the same program, and read first, so there is no race. What happens to states is decided at run time. Compiled
    separately, a prompt's rows would use other fused instructions than verify's, and round differently (seen on an
    H200).
    """
    CONV_SIZE: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    STATE_SIZE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    keys = tl.arange(0, KEY_TILE)
    values = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    is_state = is_key[:, None] & is_value[None, :]
    slot, committed = tl.load(slot_ids_ptr + request), tl.load(committed_ptr + request)
    own = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    if replays:
        state_ptrs = states_ptr + slot * STATE_SIZE + own
        state = tl.load(state_ptrs, mask=is_state, other=0.0)
        first = slot * rows_kept
        old_keys = kept_keys_ptr + (first * NUM_KEY_HEADS + key_head) * KEY_DIM + keys
        old_values = kept_values_ptr + (first * NUM_VALUE_HEADS + head) * VALUE_DIM + values
        log_decays = kept_log_decay_ptr + first * NUM_VALUE_HEADS + head
        strengths = kept_strength_ptr + first * NUM_VALUE_HEADS + head
        for row in range(committed + 1):
            key = tl.load(old_keys + row * NUM_KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)
            value = tl.load(old_values + row * NUM_VALUE_HEADS * VALUE_DIM, mask=is_value, other=0.0)
            log_decay = tl.load(log_decays + row * NUM_VALUE_HEADS)
            strength = tl.load(strengths + row * NUM_VALUE_HEADS)
            _, state = _row(state, key, key, value, log_decay, strength)
        tl.store(state_ptrs, state, mask=is_state)
    else:
        state_ptrs = states_ptr + slot * rows_kept * STATE_SIZE + own
        state = tl.load(state_ptrs + committed * STATE_SIZE, mask=is_state, other=0.0)

    mixed_ptr += request * num_rows * CONV_SIZE
    query_ptrs = mixed_ptr + key_head * KEY_DIM + keys
    key_ptrs = query_ptrs + NUM_KEY_HEADS * KEY_DIM
    value_ptrs = mixed_ptr + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    gate = request * num_rows * NUM_VALUE_HEADS + head
    out_ptrs = out_ptr + gate * VALUE_DIM + values
    query, key = tl.load(query_ptrs, mask=is_key, other=0.0), tl.load(key_ptrs, mask=is_key, other=0.0)
    value = tl.load(value_ptrs, mask=is_value, other=0.0)
    log_decay, strength = tl.load(log_decay_ptr + gate), tl.load(strength_ptr + gate)
    for row in range(num_rows):
        # The next row is loaded while this one is computed, since a prompt's time is the latency of its rows.
        ahead = tl.where(row + 1 < num_rows, 1, 0)
        next_query = tl.load(query_ptrs + ahead * CONV_SIZE, mask=is_key, other=0.0)
        next_key = tl.load(key_ptrs + ahead * CONV_SIZE, mask=is_key, other=0.0)
        next_value = tl.load(value_ptrs + ahead * CONV_SIZE, mask=is_value, other=0.0)
        next_log_decay = tl.load(log_decay_ptr + gate + ahead * NUM_VALUE_HEADS)
        next_strength = tl.load(strength_ptr + gate + ahead * NUM_VALUE_HEADS)
        output, state = _row(state, query, key, value, log_decay, strength)
        tl.store(out_ptrs, output, mask=is_value)
        if state_every_row:
            tl.store(state_ptrs, state, mask=is_state)
        state_ptrs += state_every_row * STATE_SIZE
        query, key, value, log_decay, strength = next_query, next_key, next_value, next_log_decay, next_strength
        query_ptrs += CONV_SIZE
        key_ptrs += CONV_SIZE
        value_ptrs += CONV_SIZE
        gate += NUM_VALUE_HEADS
        out_ptrs += NUM_VALUE_HEADS * VALUE_DIM
    if state_every_row + replays == 0:
        tl.store(state_ptrs, state, mask=is_state)


@operator("delta_rule", mutates_args=("states",))
def delta_rule(
    states: torch.Tensor,
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    slot_ids: torch.Tensor,
    committed: torch.Tensor,
    num_key_heads: int,
    is_prompt: bool,
) -> torch.Tensor:
    """Run rows of each request from the state at row `committed` of its slot.

    Verify writes the state after each row j to row j of the slot. A prompt only writes its last state, to row 0.
    Returns the outputs [batch, num_rows, num_value_heads, value_head_dim] float32.

    Args:
        states: [num_slots + 1, N, num_value_heads, key_head_dim, value_head_dim] float32, written at `slot_ids`.
        mixed, log_decay, strength: as `delta_inputs` returns them.
        slot_ids, committed: [batch] int64; requests may only share the scratch slot.
    """
    assert is_prompt or mixed.shape[1] <= states.shape[1]
    unread, num_states = (mixed, mixed, log_decay, strength), states.shape[1]
    rows = mixed, log_decay, strength, slot_ids, committed
    return _launch(states, rows, unread, num_states, num_key_heads, not is_prompt)


@operator("delta_replay", mutates_args=("states",))
def delta_replay(
    states: torch.Tensor,
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    slot_ids: torch.Tensor,
    committed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept_log_decay: torch.Tensor,
    kept_strength: torch.Tensor,
) -> torch.Tensor:
    """Advance the state of each slot by its kept rows 0 to `committed`, then run rows without writing their states.

    Args:
        mixed, log_decay, strength, slot_ids, committed: as in `delta_rule`, as is what is returned.
        states: [num_slots + 1, num_value_heads, key_head_dim, value_head_dim] float32, written at `slot_ids`.
        keys: [num_slots + 1, N, num_key_heads, key_head_dim] float32; this and the next three are of the last round.
        values: [num_slots + 1, N, num_value_heads, value_head_dim].
        kept_log_decay, kept_strength: [num_slots + 1, N, num_value_heads].
    """
    kept = (keys, values, kept_log_decay, kept_strength)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in kept)
    rows = mixed, log_decay, strength, slot_ids, committed
    _, num_rows, num_key_heads, _ = keys.shape
    return _launch(states, rows, kept, num_rows, num_key_heads, False, replays=True)


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""What the rule reads of its rows: `mixed`, `log_decay`, `strength`, `slot_ids`, `committed`."""


def empty_outputs(states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Check the preconditions of the rule, and allocate its outputs [batch, num_rows, num_value_heads,
    value_head_dim]."""
    mixed, log_decay, strength, slot_ids, committed = rows
    batch, num_rows, num_value_heads = log_decay.shape
    assert_rows_of(mixed, batch, num_rows, mixed.shape[2])
    assert_rows_of(strength, batch, num_rows, num_value_heads)
    assert_rows_of(slot_ids, batch)
    assert_rows_of(committed, batch)
    assert all(tensor.is_contiguous() for tensor in (states, *rows))
    assert states.dtype == mixed.dtype == log_decay.dtype == strength.dtype == torch.float32
    return states.new_empty(batch, num_rows, num_value_heads, states.shape[-1])


def _launch(
    states: torch.Tensor,
    rows: Rows,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rows_kept: int,
    num_key_heads: int,
    state_every_row: bool,
    replays: bool = False,
) -> torch.Tensor:
    out = empty_outputs(states, rows)
    batch, num_rows, num_value_heads, value_head_dim = out.shape
    key_head_dim = states.shape[-2]
    value_tile = min(VALUE_TILE, triton.next_power_of_2(value_head_dim))
    with launch_on(states):
        _delta_rule[(triton.cdiv(value_head_dim, value_tile), num_value_heads, batch)](
            out,
            states,
            *rows,
            *kept,
            num_rows,
            rows_kept,
            int(state_every_row),
            int(replays),
            NUM_KEY_HEADS=num_key_heads,
            NUM_VALUE_HEADS=num_value_heads,
            KEY_DIM=key_head_dim,
            VALUE_DIM=value_head_dim,
            # With one key a thread, its product would be fused into the sum over threads, which hold different sums.
            KEY_TILE=max(triton.next_power_of_2(key_head_dim), LEAST_TILE // value_tile),
            VALUE_TILE=value_tile,
            num_warps=NUM_WARPS,
        )
    return out
