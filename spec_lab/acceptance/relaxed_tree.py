"""Relaxed acceptance inside the thinking phase, for a tree of drafts. TensorRT-LLM refuses this combination.

Of several acceptable siblings the rule accepts the likeliest. If the argmax was drafted, that is the argmax. With
phase=token the phase depends on the path to a draft. So a draft that ends thinking does not change other branches.
"""

from __future__ import annotations

import torch

from spec_lab.acceptance.relaxed import RelaxedThinkingAcceptance, relaxed_matches
from spec_lab.acceptance.standing import draft_standing
from spec_lab.acceptance.tree import behind_stays
from spec_lab.core.draft_tree import ancestors_and_self
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


class RelaxedThinkingTreeAcceptance(RelaxedThinkingAcceptance):
    """Relaxed thinking acceptance for a tree."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        slot_ids, drafts, parents = judged.slot_ids, judged.tokens[:, 1:], judged.parents[:, 1:]
        of_parents = parents.unsqueeze(2).expand(-1, -1, judged.logits.shape[2])
        standing = draft_standing(judged.logits.gather(1, of_parents), drafts)
        behind = self._phase.thinking.behind_rows(slot_ids, judged.tokens, ancestors_and_self(judged.parents, depth))
        relaxed = self._form.threshold(standing.top)
        least = self._phase.least(slot_ids, drafts, standing.top, relaxed, behind.gather(1, parents))
        ranks = torch.where(relaxed_matches(standing, self._topk, least), standing.rank, _NEVER)

        row = torch.zeros_like(judged.parents[:, :1])
        goes_on = judged.active.unsqueeze(1)
        path, num_accepted = [row], torch.zeros_like(row)
        for _ in range(depth):
            best = torch.where(parents == row, ranks, _NEVER).min(dim=1, keepdim=True)
            goes_on = goes_on & (best.values < _NEVER)
            row = torch.where(goes_on, best.indices + 1, row)
            num_accepted = num_accepted + goes_on
            path.append(row)
        rows = behind_stays(torch.cat(path, dim=1), num_accepted, judged.tokens.shape[1])

        last = judged.logits.argmax(dim=-1).gather(1, row)
        tokens = judged.tokens.gather(1, rows).roll(-1, dims=1).scatter(1, num_accepted, last)
        num_emitted = torch.where(judged.active, num_accepted.squeeze(1) + 1, 0)
        reached = torch.arange(depth, device=tokens.device) < (num_emitted - 1).unsqueeze(1)
        was_top = standing.is_top.gather(1, (rows[:, 1:] - 1).clamp(min=0))
        num_thinking = self._phase.thinking.count(slot_ids, tokens, num_emitted)
        self.advance(slot_ids, tokens, num_emitted)
        return Walk(Verification(tokens, num_emitted, (reached & ~was_top).to(tokens.dtype), num_thinking), rows)


_NEVER = 2**62
"""The rank of a draft that may not be accepted."""
