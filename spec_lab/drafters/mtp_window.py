"""The window of vanilla MTP: the last K input tokens of each slot and their target hidden states, kept between rounds.

The design is TensorRT-LLM's (`MTPHiddenStatesManager`; the update and prepare steps of `MTPWorker`). Here `slide` makes
new tensors, so that it reads nothing that it has just overwritten. A kernel does the same in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op


@dataclass(frozen=True, slots=True)
class MtpRows:
    """Consecutive rows of each request: tokens [batch, rows] and hidden [batch, rows, hidden_size].

    As a window, row p is (t[p], h[p]). As a module's input it is (t[p+1], h[p]).
    """

    tokens: torch.Tensor
    hidden: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[1]

    def first(self, num_rows: int) -> MtpRows:
        """Return a view of the first rows."""
        return MtpRows(self.tokens[:, :num_rows], self.hidden[:, :num_rows])

    def last(self, num_rows: int) -> MtpRows:
        """Return a view of the last rows."""
        return MtpRows(self.tokens[:, -num_rows:], self.hidden[:, -num_rows:])

    def put(self, row: int, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Fill one row in place: drafts [batch] and the hidden states [batch, hidden_size] they were picked from."""
        self.tokens[:, row] = tokens
        self.hidden[:, row] = hidden


def slide(window: MtpRows, inputs: MtpRows, num_valid: torch.Tensor, num_rows: int) -> MtpRows:
    """Return the last `num_rows` rows of `window` and the first `num_valid` rows of `inputs` after it.

    If `num_rows` is the window's size K, this is TensorRT-LLM's update. After a round it keeps rows [n, n + K) of the
    window followed by the N inputs; after a prompt chunk, the last K of both. If the prompt is shorter than K, the
    first rows stay zero, as they were at admission.

    Args:
        num_valid: [batch] the number of valid inputs: n, or the rows of a chunk. At least `num_rows` - K.
    """
    first = window.num_rows - num_rows + num_valid
    columns = first.unsqueeze(1) + torch.arange(num_rows, device=first.device)
    tokens = torch.cat((window.tokens, inputs.tokens), dim=1)
    hidden = torch.cat((window.hidden, inputs.hidden), dim=1)
    wide = columns.unsqueeze(2).expand(-1, -1, hidden.shape[2])
    return MtpRows(tokens.gather(1, columns), hidden.gather(1, wide))


def pair_with_next(rows: MtpRows, next_tokens: torch.Tensor) -> MtpRows:
    """Turn pairs (t[p], h[p]) into the first module's (t[p+1], h[p]); `next_tokens` [batch] follow the last row."""
    return MtpRows(torch.cat((rows.tokens[:, 1:], next_tokens.unsqueeze(1)), dim=1), rows.hidden)


def with_room(rows: MtpRows, num_drafts: int) -> MtpRows:
    """Return a copy with `num_drafts` zero rows appended, for `put` to fill."""
    return MtpRows(F.pad(rows.tokens, (0, num_drafts)), F.pad(rows.hidden, (0, 0, 0, num_drafts)))


def slide_windows(
    window_tokens: torch.Tensor,
    window_hidden: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    slot_ids: torch.Tensor,
    num_valid: torch.Tensor,
) -> None:
    """Slide the windows of `slot_ids` [batch] over the first `num_valid` [batch] inputs; 0 changes nothing."""
    window = MtpRows(window_tokens.index_select(0, slot_ids), window_hidden.index_select(0, slot_ids))
    rows = slide(window, MtpRows(tokens, hidden), num_valid, window.num_rows)
    window_tokens.index_copy_(0, slot_ids, rows.tokens)
    window_hidden.index_copy_(0, slot_ids, rows.hidden)


class MtpWindow:
    """The window of each slot: tokens [num_slots + 1, K] and hidden [num_slots + 1, K, hidden_size].

    The last row is the scratch slot.
    """

    def __init__(
        self,
        num_slots: int,
        size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        self._slide = kernels.get(Op.MTP_WINDOW, slide_windows)
        self.tokens = torch.zeros((num_slots + 1, size), dtype=torch.int64, device=device)
        self.hidden = torch.zeros((num_slots + 1, size, hidden_size), dtype=dtype, device=device)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def clear(self, slot: int) -> None:
        """Zero the slot's window for a new request."""
        self.tokens[slot].zero_()
        self.hidden[slot].zero_()

    def of(self, slot_ids: torch.Tensor) -> MtpRows:
        """Return a copy of the windows of `slot_ids` [batch]."""
        return MtpRows(self.tokens.index_select(0, slot_ids), self.hidden.index_select(0, slot_ids))

    def slide(self, slot_ids: torch.Tensor, inputs: MtpRows, num_valid: torch.Tensor) -> None:
        """Slide the windows of `slot_ids` [batch] over the first `num_valid` [batch] of `inputs`; 0 changes nothing."""
        self._slide(self.tokens, self.hidden, inputs.tokens, inputs.hidden, slot_ids, num_valid)
