"""The rows of rounds without the drafter: a ring in each slot, from which one pass lets the drafter catch up."""

from __future__ import annotations

from dataclasses import replace

import torch

from spec_lab.core.rows import rows_at
from spec_lab.core.types import VerifiedRound


class MissedRows:
    """What the drafter has not seen: features and tokens of up to `size` rounds of one token each.

    To the drafter, the kept rounds are one round of which `size` rows were verified and as many emitted as are kept.

    Attributes:
        counts: [num_slots + 1] rounds that each slot keeps.
    """

    def __init__(self, num_slots: int, size: int, feature_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._inputs = torch.zeros((num_slots + 1, size), dtype=torch.int64, device=device)
        self._features = torch.zeros((num_slots + 1, size, feature_size), dtype=dtype, device=device)

    def clear(self, slot: int) -> None:
        """Forget what the last request of `slot` left."""
        self.counts[slot] = 0

    def keep(self, verified: VerifiedRound) -> None:
        """Add a round of one row a request, whose token is the next round's input."""
        slot_ids = verified.batch.slot_ids
        counts = rows_at(self.counts, slot_ids)
        self._inputs.index_put_((slot_ids, counts), verified.batch.input_ids[:, 0])
        if verified.features is not None:
            self._features.index_put_((slot_ids, counts), verified.features)
        self.counts.index_copy_(0, slot_ids, counts + verified.verification.num_emitted)

    def take(self, verified: VerifiedRound) -> VerifiedRound:
        """Return the kept rounds, of which `verified` is the last, as one round; forget them."""
        batch, slot_ids = verified.batch, verified.batch.slot_ids
        counts, input_ids = rows_at(self.counts, slot_ids), rows_at(self._inputs, slot_ids)
        last = (counts - 1).clamp(min=0)[:, None]
        tokens = input_ids.roll(-1, 1).scatter(1, last, verified.verification.tokens[:, :1])
        num_emitted = torch.where(batch.active, counts, 0)
        kept = replace(
            batch,
            input_ids=input_ids,
            kv_lens=batch.kv_lens + verified.verification.num_emitted - num_emitted,
        )
        verification = replace(verified.verification, tokens=tokens, num_emitted=num_emitted, relaxed=None)
        features = None if verified.features is None else rows_at(self._features, slot_ids).flatten(0, 1)
        self.counts.index_fill_(0, slot_ids, 0)
        return VerifiedRound(kept, verification, features)
