"""Draws the target's next token after each row of a tree, by an exponential race with the lab's noise."""

from __future__ import annotations

import torch

from spec_kernels.gumbel import draw
from spec_kernels.operators import operator
from spec_kernels.tree_walk import follow_chosen


@operator("draw_rows")
def draw_rows(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Draw a token after each row from softmax(logits / temperature): [batch, N] int64.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16.
        slot_ids: [batch] int64. A row's noise depends on its place, and on its request's seed and length.
        slot_seeds: [num_slots + 1] int64.
        kv_lens: [batch] int64.
        temperature: above 0. For top-k and top-p, pass the truncated, scaled logits and temperature 1.
    """
    return draw(logits, slot_ids, slot_seeds, kv_lens, temperature)


def draw_tree(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float | None,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token after each row, follow these tokens, and return tokens, num_emitted and path as in `follow_chosen`.

    `temperature`: None if the logits are already scaled.
    """
    chosen = draw_rows(logits, slot_ids, slot_seeds, kv_lens, 1.0 if temperature is None else temperature)
    return follow_chosen(chosen, drafts, parents, active, depth)
