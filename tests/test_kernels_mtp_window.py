"""The kernel that slides MTP windows in place, with padded rows."""

from __future__ import annotations

import torch

from spec_kernels.mtp_window import slide_windows
from spec_lab.drafters.mtp_window import MtpRows, MtpWindow
from tests.kernel_lab import DEVICE, randn

NUM_SLOTS = 9


def windows(size: int, hidden_size: int, dtype: torch.dtype) -> MtpWindow:
    window = MtpWindow(NUM_SLOTS, size, hidden_size, dtype, DEVICE)
    window.tokens.copy_(torch.arange(window.tokens.numel()).view_as(window.tokens))
    window.hidden.copy_(randn(*window.hidden.shape, seed=1, dtype=dtype))
    return window


def inputs(batch: int, num_rows: int, hidden_size: int, dtype: torch.dtype) -> MtpRows:
    """Inputs that are views of wider rows: no stride is the one of a contiguous tensor."""
    tokens = torch.arange(1000, 1000 + batch * (num_rows + 1), device=DEVICE).view(batch, num_rows + 1)[:, 1:]
    return MtpRows(tokens, randn(batch, num_rows + 1, hidden_size + 3, seed=2, dtype=dtype)[:, 1:, :hidden_size])


def test_padded_rows_share_the_scratch_slot_and_change_nothing() -> None:
    """Their inputs are NaN; so is what lies behind the valid inputs of the others."""
    got, before = windows(3, 24, torch.float32), windows(3, 24, torch.float32)
    rows = inputs(4, 4, 24, torch.float32)
    rows.hidden[1:] = float("nan")
    rows.hidden[0, 2:] = float("nan")
    slot_ids = torch.tensor([2, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS], device=DEVICE)
    num_valid = torch.tensor([2, 0, 0, 0], device=DEVICE)
    slide_windows(got.tokens, got.hidden, rows.tokens, rows.hidden, slot_ids, num_valid)
    others = torch.arange(NUM_SLOTS + 1, device=DEVICE) != 2
    assert torch.equal(got.tokens[others], before.tokens[others])
    assert torch.equal(got.hidden[others], before.hidden[others]) and got.hidden.isfinite().all()
    assert torch.equal(got.hidden[2, 1:], rows.hidden[0, :2])
