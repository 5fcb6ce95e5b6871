"""The kernel that slides MTP windows in place, against its reference and against the drafter's own functions."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.mtp_window import slide_windows, slide_windows_reference
from spec_lab.drafters.mtp_window import MtpRows, MtpWindow, slide
from tests.kernel_lab import DEVICE, DTYPES, randn

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_rows", "hidden_size"), [(1, 2, 16), (3, 4, 40), (5, 6, 700), (4, 3, 7)])
def test_slides_like_the_drafter_for_every_number_of_valid_inputs(
    dtype: torch.dtype, size: int, num_rows: int, hidden_size: int
) -> None:
    batch = 6
    rows = inputs(batch, num_rows, hidden_size, dtype)
    slot_ids = torch.tensor([4, 1, 8, 0, 6, 3], device=DEVICE)
    for first in range(num_rows + 1):
        num_valid = (torch.arange(batch, device=DEVICE) + first) % (num_rows + 1)
        got, reference, expected = (windows(size, hidden_size, dtype) for _ in range(3))
        slide_windows(got.tokens, got.hidden, rows.tokens, rows.hidden, slot_ids, num_valid)
        slide_windows_reference(reference.tokens, reference.hidden, rows.tokens, rows.hidden, slot_ids, num_valid)
        expected.store(slot_ids, slide(expected.of(slot_ids), rows, num_valid, size))
        for other in (got, reference):
            assert torch.equal(other.tokens, expected.tokens) and torch.equal(other.hidden, expected.hidden)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 11])
def test_takes_a_prompt_chunk_shorter_or_longer_than_the_window(num_rows: int) -> None:
    """The old rows in front of a short one stay; nothing in front of a long one is read."""
    got, expected = windows(3, 24, torch.float32), windows(3, 24, torch.float32)
    rows = inputs(1, num_rows, 24, torch.float32)
    slot_ids, num_valid = torch.tensor([5], device=DEVICE), torch.tensor([num_rows], device=DEVICE)
    slide_windows(got.tokens, got.hidden, rows.tokens, rows.hidden, slot_ids, num_valid)
    expected.store(slot_ids, slide(expected.of(slot_ids), rows, num_valid, 3))
    assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.hidden, expected.hidden)
    assert got.tokens[5, -1] == rows.tokens[0, -1]


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
