"""Attention over a paged KV cache in plain torch, for tests and benchmarks."""

from __future__ import annotations

import torch


def paged_attention_reference(
    queries: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    visible: torch.Tensor | None = None,
    depths: torch.Tensor | None = None,
    key_depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what `paged_attention` computes, in float32: same arguments; returns [batch * num_queries, num_heads *
    head_dim] in the queries' dtype."""
    batch, num_columns = page_table.shape
    num_rows, num_heads, head_dim = queries.shape
    num_queries, num_kv_heads = num_rows // batch, kv.shape[2]
    positions = torch.arange(min(max_seq_len, (num_columns - 1) * page_size), device=kv.device)
    slots = page_table[:, positions // page_size] * page_size + positions % page_size
    is_visible = _visible_keys(positions, seq_lens, num_queries, window)
    if visible is not None:
        assert depths is not None and key_depths is not None
        is_visible = _visible_in_tree(positions, seq_lens, window, visible, depths, key_depths)
    # Selection, not multiplication: rows that nobody sees may be NaN.
    is_read = is_visible.any(1)[:, :, None, None, None]
    keys, values = torch.where(is_read, kv[slots], 0).float().unbind(2)
    grouped = queries.float().view(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bqhgd,bkhd->bqhgk", grouped, keys) * scale
    scores = scores.masked_fill(~is_visible[:, :, None, None, :], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row that sees nothing
    out = torch.einsum("bqhgk,bkhd->bqhgd", weights, values)
    return out.reshape(num_rows, num_heads * head_dim).to(queries.dtype)


def _visible_keys(
    positions: torch.Tensor, seq_lens: torch.Tensor, num_queries: int, window: int | None
) -> torch.Tensor:
    """Say which keys each row of a chain sees: [batch, num_queries, keys]."""
    behind = torch.arange(num_queries - 1, -1, -1, device=positions.device)
    ends = (seq_lens.unsqueeze(1) - behind).unsqueeze(2)
    is_visible = positions < ends
    return is_visible if window is None else is_visible & (positions >= ends - window)


def _visible_in_tree(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None,
    visible: torch.Tensor,
    depths: torch.Tensor,
    key_depths: torch.Tensor,
) -> torch.Tensor:
    """Say which keys each row of a tree sees: [batch, num_queries, keys]."""
    num_queries, num_tail = visible.shape[1:]
    numbers = (positions - (seq_lens - num_tail).unsqueeze(1)).unsqueeze(1).expand(-1, num_queries, -1)
    numbers_in_tail = numbers.clamp(0, num_tail - 1)
    in_tail = visible.gather(2, numbers_in_tail)
    prefix = torch.ones_like(in_tail)
    if window is not None:
        oldest = depths.unsqueeze(2) - window
        in_tail &= key_depths.unsqueeze(1).expand(-1, num_queries, -1).gather(2, numbers_in_tail) > oldest
        prefix = numbers > oldest
    return torch.where(numbers < 0, prefix, in_tail & (numbers < num_tail))
