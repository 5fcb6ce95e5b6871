"""The gated delta rule in plain torch: what `delta_rule.py` computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def delta_rule_reference(
    out: torch.Tensor,
    states: torch.Tensor,
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    slot_ids: torch.Tensor,
    committed: torch.Tensor,
    num_key_heads: int,
    is_prompt: bool,
) -> None:
    """Do what `delta_rule` does."""
    begin = states[slot_ids, committed]
    for row, (output, state) in enumerate(_rows(mixed, log_decay, strength, begin, num_key_heads)):
        out[:, row] = output
        states[slot_ids, 0 if is_prompt else row] = state


def delta_replay_reference(
    out: torch.Tensor,
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
) -> None:
    """Do what `delta_replay` does, one slot at a time, since slots have different numbers of accepted rows."""
    num_key_heads = keys.shape[2]
    for request, slot in enumerate(slot_ids.tolist()):
        accepted = slice(0, int(committed[request]) + 1)
        kept = torch.cat([part[slot, accepted].flatten(1) for part in (keys, keys, values)], dim=1)
        decay, gate = (part[slot, accepted].unsqueeze(0) for part in (kept_log_decay, kept_strength))
        for _, state in _rows(kept.unsqueeze(0), decay, gate, states[slot].unsqueeze(0), num_key_heads):
            states[slot] = state[0]
    for row, (output, _) in enumerate(_rows(mixed, log_decay, strength, states[slot_ids], num_key_heads)):
        out[:, row] = output


def _rows(
    mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, state: torch.Tensor, num_key_heads: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the output of each row, and the states [batch, num_value_heads, key_head_dim, value_head_dim] after it."""
    num_value_heads, key_head_dim, value_head_dim = state.shape[1:]
    sizes = (num_key_heads * key_head_dim, num_key_heads * key_head_dim, num_value_heads * value_head_dim)
    queries, keys, values = mixed.split(sizes, dim=-1)
    queries, keys = (
        part.unflatten(-1, (num_key_heads, -1)).repeat_interleave(num_value_heads // num_key_heads, dim=2)
        for part in (queries, keys)
    )
    values = values.unflatten(-1, (num_value_heads, -1))
    for row in range(mixed.shape[1]):
        state = state * log_decay[:, row].exp()[..., None, None]
        key, query = keys[:, row].unsqueeze(-1), queries[:, row].unsqueeze(-1)
        answer = (state * key).sum(-2)
        state = state + key * (strength[:, row].unsqueeze(-1) * (values[:, row] - answer)).unsqueeze(-2)
        yield (state * query).sum(-2), state
