"""Attention over a paged KV cache in plain torch, for tests and benchmarks."""

from __future__ import annotations

import torch

from spec_kernels.narrow_kv_reference import widened


def paged_attention_reference(
    queries: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    path_slots: torch.Tensor | None = None,
    depths: torch.Tensor | None = None,
    num_tail: int = 0,
    sinks: torch.Tensor | None = None,
    powers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what `paged_attention` computes, in float32; returns [batch * num_queries, num_heads * head_dim] in the
    queries' dtype. The arguments are the same, except that `out` and `split_keys` are missing."""
    if powers is not None:
        kv = widened(kv, powers, torch.float32)
    batch, num_columns = page_table.shape
    num_rows, num_heads, head_dim = queries.shape
    num_queries, num_kv_heads = num_rows // batch, kv.shape[2]
    positions = torch.arange(min(max_seq_len, (num_columns - 1) * page_size), device=kv.device)
    behind = torch.arange(num_queries - 1, -1, -1, device=kv.device)
    ends = seq_lens.unsqueeze(1) - behind
    slots = _slots(positions.expand(batch, 1, -1), page_table, page_size)
    if path_slots is not None:
        assert depths is not None
        prefixes = (seq_lens - num_tail).view(-1, 1, 1)
        ends = prefixes.squeeze(2) + depths + 1
        behind = (positions - prefixes).expand(-1, num_queries, -1)
        own = path_slots.gather(2, behind.clamp(0, path_slots.shape[2] - 1))
        slots = torch.where(behind >= 0, own, slots)
    is_visible = positions < ends.unsqueeze(2)
    if window is not None:
        is_visible &= positions >= ends.unsqueeze(2) - window
    # Cache rows are selected, not multiplied by 0, since those that no query row sees may be NaN.
    is_read = is_visible if path_slots is not None else is_visible.any(1, keepdim=True)
    keys, values = torch.where(is_read[..., None, None, None], kv[slots.where(is_read, 0)], 0).float().unbind(3)
    grouped = queries.float().view(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bqhgd,bqkhd->bqhgk", grouped, keys.expand(-1, num_queries, -1, -1, -1)) * scale
    scores = scores.masked_fill(~is_visible[:, :, None, None, :], float("-inf"))
    if sinks is not None:
        of_sinks = sinks.float().view(num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, of_sinks), dim=-1)
    weights = scores.softmax(-1)[..., : len(positions)].nan_to_num(0.0)  # for rows that see no key
    out = torch.einsum("bqhgk,bqkhd->bqhgd", weights, values.expand(-1, num_queries, -1, -1, -1))
    return out.reshape(num_rows, num_heads * head_dim).to(queries.dtype)


def _slots(places: torch.Tensor, page_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Find the cache slots of positions `places` [batch, ...] of the requests."""
    pages = page_table.gather(1, (places // page_size).flatten(1)).view_as(places)
    return pages * page_size + places % page_size
