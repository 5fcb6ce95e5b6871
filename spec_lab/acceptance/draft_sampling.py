"""Samples drafts from the drafter's distribution, and stores its logits for verification.

Greedy drafts do not need this, since their q is one-hot.
"""

from __future__ import annotations

import torch

from spec_kernels.noise_reference import Use, race, round_key


def sample_draft(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, kv_lens: torch.Tensor, step: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one draft token for each request, and return it with the logits of its distribution.

    Args:
        logits: [batch, vocab] of the drafter in target ids, -inf outside the draft vocabulary.
        temperature: above 0. Top-k and top-p apply only to the target, since any proposal distribution is valid.
        seeds: [batch] request seeds.
        kv_lens: [batch] L at the start of the round that will verify the draft.
        step: the index of the draft in the round, from 0; a tensor in a graph that is replayed for each step.

    Returns:
        tokens [batch], and float32 logits [batch, vocab] with q = softmax(logits). These must be kept for verification,
        and not the input logits.
    """
    assert temperature > 0, "greedy drafts are an argmax"
    scaled = logits.float() / temperature
    return race(torch.softmax(scaled, dim=-1), round_key(seeds, kv_lens, step, Use.DRAFT)), scaled


class DraftLogits:
    """The float32 logits of each slot's unverified drafts, [num_slots + 1, K, vocab]; in a tree, branches instead of K.

    They are stored by slot, since requests enter and leave between the round that drafts and the one that verifies. The
    address is fixed, and the step index is a tensor. So one captured step can be replayed.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int, vocab_size: int, device: torch.device) -> None:
        self.values = torch.zeros((num_slots + 1, num_draft_tokens, vocab_size), device=device)

    def write_rows(self, slot_ids: torch.Tensor, steps: torch.Tensor, logits: torch.Tensor) -> None:
        """Store the float32 logits [batch, steps, vocab] of the drafts at indices `steps` [steps]."""
        self.values.index_put_((slot_ids.unsqueeze(1), steps), logits)

    def of(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Return the stored logits of `slot_ids`, [batch, K, vocab]."""
        return self.values.index_select(0, slot_ids)


def sample_and_keep(
    kept_logits: torch.Tensor,
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    column: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Draw a token for each request like `sample_draft`, store the logits of its distribution, and return tokens
    [batch].

    The logits are written to `kept_logits` [num_slots + 1, K, vocab] at `slot_ids` [batch] and `column` [1], the step.
    """
    seeds = slot_seeds.index_select(0, slot_ids)
    tokens, scaled = sample_draft(logits, temperature, seeds, kv_lens, column)
    kept_logits.index_put_((slot_ids, column.expand_as(slot_ids)), scaled)
    return tokens
