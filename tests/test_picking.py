"""How drafts are picked: the likeliest token that is verified as if it were drawn."""

from __future__ import annotations

import torch

from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.drafters.confidence import ScoredHead
from spec_lab.drafters.picking import BiasedGreedyPicker, DraftedRows

CPU = torch.device("cpu")


def test_what_is_biased_takes_the_likeliest_token_and_keeps_the_law() -> None:
    """At a temperature at which drawing would take others, too."""
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    picker = BiasedGreedyPicker(2.0, SlotSeeds(40, 0, CPU), DraftLogits(40, 2, 6, CPU))
    rows, hidden = DraftedRows(torch.arange(40), torch.full((40,), 9)), torch.zeros(40, 1)
    heads = [ScoredHead(logits), ScoredHead(-logits)]
    picked = [picker.pick(heads[0], hidden, rows), picker.pick(heads[1], hidden, rows, torch.tensor([1]))]
    assert torch.equal(torch.stack(picked), torch.stack([logits.argmax(-1), logits.argmin(-1)]))
    kept = picker.kept_logits(rows.slot_ids.flip(0))
    assert kept is not None and torch.equal(kept.flip(0), torch.stack([logits, -logits], dim=1) / 2)
