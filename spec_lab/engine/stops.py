"""The device decides here which requests have ended, where rounds follow each other without the host.

It is `scheduler.emit_round` in tensors: an end of sequence, or `max_new_tokens`. The host goes through the same rounds
afterwards and comes to the same ends, which the engine asserts.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from spec_lab.core.types import Request, Verification


class StopConditions:
    """Keeps what ends the request in each slot; the last row is the scratch slot's, which has always ended.

    Attributes:
        end_lens: [num_slots + 1] the committed length L from which a request has all tokens that it asked for.
        heeds_eos: [num_slots + 1] bool, whether an end of sequence ends it.
    """

    def __init__(self, num_slots: int, eos_token_ids: Collection[int], device: torch.device) -> None:
        self.end_lens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.heeds_eos = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)

    def admit(self, slot: int, request: Request) -> None:
        """Note the limits of a request that takes `slot`. Its last token is never committed, so L stays one behind."""
        self.end_lens[slot] = len(request.prompt_ids) + request.max_new_tokens - 1
        self.heeds_eos[slot] = not request.ignore_eos

    def have_ended(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, verification: Verification, accepts_unseen: bool
    ) -> torch.Tensor:
        """Tell of [batch] slots whether the round just committed was their last one.

        Args:
            kv_lens: [batch] L behind the round.
            accepts_unseen: drafts were accepted whatever they are, so that only the last token can be an end.
        """
        tokens, num_emitted = verification.tokens, verification.num_emitted.unsqueeze(1)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        is_decided = columns == num_emitted - 1 if accepts_unseen else columns < num_emitted
        is_eos = (tokens.unsqueeze(2) == self._eos_token_ids).any(dim=2)
        has_eos = (is_eos & is_decided).any(dim=1) & self.heeds_eos.index_select(0, slot_ids)
        return has_eos | (kv_lens >= self.end_lens.index_select(0, slot_ids))
