"""The device decides here which requests have ended, where rounds follow each other without the host.

It is `scheduler.emit_round` in tensors: an end of sequence, or `max_new_tokens`. The host goes through the same rounds
afterwards and comes to the same ends, which the engine asserts.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from spec_lab.core.types import Request, Verification
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet, Op


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
    """Return slots [batch] with the scratch slot, the last one, in place of those whose request has ended.

    It has where `kv_lens` reaches `end_lens`, or an end of sequence is among the tokens [batch, N] that count, or with
    `only_last` is the last of them; what belongs to slots is [num_slots + 1].
    """
    last = num_emitted.unsqueeze(1) - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_decided = columns == last if only_last else columns <= last
    is_end = (tokens.unsqueeze(2) == eos_token_ids).any(dim=2) & is_decided
    has_end = is_end.any(dim=1) & (heeds_eos.index_select(0, slot_ids) > 0)
    has_all = kv_lens.index_select(0, slot_ids) >= end_lens.index_select(0, slot_ids)
    return slot_ids.masked_fill(has_end | has_all, kv_lens.shape[0] - 1)


class StopConditions:
    """What ends the request in each slot; the last row is the scratch slot's, which has always ended.

    Attributes:
        end_lens: [num_slots + 1] the committed length L from which a request has all tokens that it asked for.
        heeds_eos: [num_slots + 1] 1 where an end of sequence ends the request, else 0.
    """

    def __init__(
        self, num_slots: int, eos_token_ids: Collection[int], device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        self.end_lens, self.heeds_eos = torch.zeros((2, num_slots + 1), dtype=torch.int64, device=device)
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self._going_on = kernels.get(Op.GOING_ON, going_on)

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
