"""Rules judge a tree of drafts from the root down."""

from __future__ import annotations

import torch

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


class StrictTreeAcceptance(StrictAcceptance):
    """Keeps the protocol `TreeRule`: follows the target's argmax from the root as long as it has been drafted.

    The token after each row of the path is the argmax there, so the last of them is the correction or, below a leaf,
    the bonus token.
    """

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        best = judged.logits.argmax(dim=-1)
        is_draft = torch.arange(best.shape[1], device=best.device) > 0
        row = torch.zeros_like(best[:, :1])
        goes_on = judged.active.unsqueeze(1)
        path, num_accepted = [row], torch.zeros_like(row)
        for _ in range(depth):
            hits = is_draft & (judged.parents == row) & (judged.tokens == best.gather(1, row))
            goes_on = goes_on & hits.any(dim=1, keepdim=True)
            row = torch.where(goes_on, hits.int().argmax(dim=1, keepdim=True), row)
            num_accepted = num_accepted + goes_on
            path.append(row)
        # Behind the path the rows stay where they are, as those of a chain do.
        columns = torch.arange(depth + 1, device=best.device)
        rows = torch.where(columns <= num_accepted, torch.cat(path, dim=1), columns.clamp(max=best.shape[1] - 1))
        num_emitted = torch.where(judged.active, num_accepted.squeeze(1) + 1, 0)
        return Walk(Verification(best.gather(1, rows), num_emitted), rows)
