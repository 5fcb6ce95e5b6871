"""Decides on the device which requests have ended, for rounds that follow each other without the host.

It applies the conditions of `scheduler.emit_round` in tensors: an end of sequence, or `max_new_tokens`. The host
accounts for the same rounds afterwards, and asserts that the device has ended the same requests. A request's own stops
are the host's alone: what the device emits after one is surplus.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.types import Request, Verification


def going_on(
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    kv_lens: torch.Tensor,
    end_lens: torch.Tensor,
    heeds_eos: torch.Tensor,
    eos_token_ids: torch.Tensor,
    only_last: bool,
) -> torch.Tensor:
    """Return the slots [batch], with the scratch slot (the last one) in place of those whose request has ended.

    A request ends if `kv_lens` reaches `end_lens`. Unless `heeds_eos` is 0, it also ends if one of its emitted `tokens`
    [batch, N] is an end of sequence. With `only_last` only its last emitted token is examined. Tensors by slot are
    [num_slots + 1].
    """
    last = num_emitted.unsqueeze(1) - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_decided = columns == last if only_last else columns <= last
    is_end = (tokens.unsqueeze(2) == eos_token_ids).any(dim=2) & is_decided
    has_end = is_end.any(dim=1) & (heeds_eos.index_select(0, slot_ids) > 0)
    has_all = kv_lens.index_select(0, slot_ids) >= end_lens.index_select(0, slot_ids)
    return slot_ids.masked_fill(has_end | has_all, kv_lens.shape[0] - 1)


class StopConditions:
    """The conditions that end the request in each slot. The last row is the scratch slot, which has always ended.

    Attributes:
        end_lens: [num_slots + 1] the committed length L at which a request has all the tokens it asked for.
        heeds_eos: [num_slots + 1] 1 if an end of sequence ends the request, else 0.
    """

    def __init__(
        self, num_slots: int, eos_token_ids: Collection[int], device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        self.end_lens, self.heeds_eos = torch.zeros((2, num_slots + 1), dtype=torch.int64, device=device)
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self._going_on = kernels.get(Op.GOING_ON, going_on)

    def admit(self, slot: int, request: Request) -> None:
        """Store the limits of a request that takes `slot`. It has all its tokens when L is one less than their number:
        the last one is pending."""
        self.end_lens[slot] = len(request.prompt_ids) + request.max_new_tokens - 1
        self.heeds_eos[slot] = not request.ignore_eos

    def going_on(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, verification: Verification, accepts_unseen: bool
    ) -> torch.Tensor:
        """Return the slots [batch], with the scratch slot in place of those whose request has ended.

        Args:
            slot_ids: [batch] of the round just committed.
            kv_lens: [num_slots + 1] L of all slots after it.
            accepts_unseen: drafts were accepted without being judged, so only the last token can end a request.
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
