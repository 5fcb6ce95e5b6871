"""The device state of the request slots, from which a round reads its batch."""

from __future__ import annotations

import torch

from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.rows import rows_at
from spec_lab.core.types import RoundBatch, Verification
from spec_lab.engine.pages import PageTable
from spec_lab.engine.states import SlotStates


def commit_rows(
    kv_lens: torch.Tensor,
    input_ids: torch.Tensor,
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> torch.Tensor:
    """Add n to L of the slots, and write the last emitted token as the pending one, followed by the drafts.

    Returns:
        The index [batch] of that token in the round, n - 1. It is 0 for inactive rows, whose n is 0 and whose L stays.
    """
    last = (num_emitted - 1).clamp(min=0)
    pending = tokens.gather(1, last.unsqueeze(1))
    kv_lens.index_add_(0, slot_ids, num_emitted)
    input_ids.index_copy_(0, slot_ids, torch.cat((pending, draft_tokens), dim=1))
    return last


class SlotState:
    """The tensors of all slots, at fixed addresses. The last row is the scratch slot, for padded rows.

    Attributes:
        kv_lens: [num_slots + 1] committed KV length L.
        input_ids: [num_slots + 1, N] the pending token and the drafts of the next round.
        table: the pages of each slot.
        states: which recurrent state each slot continues from, if the target has any.
    """

    def __init__(
        self,
        num_slots: int,
        num_draft_tokens: int,
        table: PageTable,
        states: SlotStates | None = None,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        device = table.pages.device
        self.table = table
        self.states = states or SlotStates(())
        self._commit = kernels.get(Op.COMMIT_ROWS, commit_rows)
        self.kv_lens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.input_ids = torch.zeros((num_slots + 1, num_draft_tokens + 1), dtype=torch.int64, device=device)

    def ids(self, slots: list[int], padded_size: int) -> torch.Tensor:
        """Return the ids of `slots`, padded with the scratch slot, [padded_size]."""
        padding = [self.table.scratch_slot] * (padded_size - len(slots))
        # Pinned memory makes the copy asynchronous. Otherwise the host would wait for the round in flight.
        ids = torch.tensor(slots + padding, pin_memory=self.kv_lens.is_cuda)
        return ids.to(self.kv_lens.device, non_blocking=True)

    def batch(self, slot_ids: torch.Tensor, max_kv_len: int) -> RoundBatch:
        """Return the rows of `slot_ids` [batch]; rows of the scratch slot are inactive."""
        return RoundBatch(
            slot_ids=slot_ids,
            active=slot_ids != self.table.scratch_slot,
            kv_lens=rows_at(self.kv_lens, slot_ids),
            input_ids=rows_at(self.input_ids, slot_ids),
            page_table=rows_at(self.table.pages, slot_ids),
            max_kv_len=max_kv_len,
            recurrent=self.states.of_round(slot_ids),
        )

    def commit(self, batch: RoundBatch, verification: Verification, draft_tokens: torch.Tensor) -> None:
        """Add n to L, and make the last emitted token the pending one. Inactive rows emit 0, so their L stays."""
        last = self._commit(
            self.kv_lens, self.input_ids, batch.slot_ids, verification.tokens, verification.num_emitted, draft_tokens
        )
        self.states.commit(batch.slot_ids, last)

    def start(self, ends: PromptEnds, draft_tokens: torch.Tensor) -> None:
        """Set the slots whose prompts have ended, with their first drafts [ended, N - 1]."""
        self.kv_lens.index_copy_(0, ends.slot_ids, ends.kv_lens)
        inputs = torch.cat((ends.tokens.unsqueeze(1), draft_tokens), dim=1)
        self.input_ids.index_copy_(0, ends.slot_ids, inputs)

    def clear(self, slot: int) -> None:
        """Reset the slot's state for a new request."""
        self.kv_lens[slot] = 0
        self.input_ids[slot].zero_()
        self.table.clear(slot)
        self.states.clear(slot)
