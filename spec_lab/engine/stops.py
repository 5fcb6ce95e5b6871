"""The device decides here which requests have ended, where rounds follow each other without the host.

It is `scheduler.emit_round` in tensors: an end of sequence, or `max_new_tokens`. The host goes through the same rounds
afterwards and comes to the same ends, which the engine asserts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from spec_lab.core.types import Request, Verification

GoingOn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool],
    torch.Tensor,
]
"""Is `spec_kernels.stops_reference.going_on_reference`, or a kernel that does the same."""


class StopConditions:
    """Keeps what ends the request in each slot; the last row is the scratch slot's, which has always ended.

    Attributes:
        end_lens: [num_slots + 1] the committed length L from which a request has all tokens that it asked for.
        heeds_eos: [num_slots + 1] 1 where an end of sequence ends the request, else 0.
    """

    def __init__(self, num_slots: int, eos_token_ids: Collection[int], device: torch.device, going_on: GoingOn) -> None:
        self.end_lens, self.heeds_eos = torch.zeros((2, num_slots + 1), dtype=torch.int64, device=device)
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self._going_on = going_on

    def admit(self, slot: int, request: Request) -> None:
        """Note the limits of a request that takes `slot`. Its last token is never committed, so L stays one behind."""
        self.end_lens[slot] = len(request.prompt_ids) + request.max_new_tokens - 1
        self.heeds_eos[slot] = not request.ignore_eos

    def going_on(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, verification: Verification, accepts_unseen: bool
    ) -> torch.Tensor:
        """Return [batch] slots with the scratch slot in place of those whose request has ended.

        Args:
            slot_ids: [batch] of the round just committed.
            kv_lens: [num_slots + 1] L of all slots behind it.
            accepts_unseen: drafts were accepted whatever they are, so that only the last token can be an end.
        """
        return self._going_on(
            slot_ids,
            verification.tokens,
            verification.num_emitted,
            kv_lens,
            self.end_lens,
            self.heeds_eos,
            self._eos_token_ids,
            accepts_unseen,
        )
