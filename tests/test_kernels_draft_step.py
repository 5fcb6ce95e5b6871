"""The kernel between two draft steps, over all steps of a round."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.draft_step import update_draft_inputs
from tests.kernel_lab import DEVICE, DTYPES, randn

POISON = -7


def buffers(batch: int, num_draft_tokens: int, hidden_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Poisoned drafts, next tokens and next hidden states, as rows of wider buffers."""
    drafts = torch.full((batch, num_draft_tokens + 2), POISON, device=DEVICE)[:, :num_draft_tokens]
    hidden = torch.full((batch, hidden_size + 8), float("nan"), dtype=dtype, device=DEVICE)[:, :hidden_size]
    return [drafts, torch.full((batch,), POISON, device=DEVICE), hidden]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "num_draft_tokens", "hidden_size"), [(1, 1, 16), (3, 4, 40), (5, 3, 1100), (33, 2, 7)]
)
def test_every_column_is_written_and_the_last_step_hands_on_nothing(
    dtype: torch.dtype, batch: int, num_draft_tokens: int, hidden_size: int
) -> None:
    """One column tensor stays at one address, as under a graph that is replayed."""
    got = buffers(batch, num_draft_tokens, hidden_size, dtype)
    column = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for index in range(num_draft_tokens):
        column.fill_(index)
        tokens = torch.arange(batch, device=DEVICE) + 100 * index
        hidden = randn(batch, 2 * hidden_size, seed=index, dtype=dtype)[:, ::2].contiguous()
        before = got[1].clone()
        update_draft_inputs(*got, tokens, hidden, column)
        assert index == num_draft_tokens - 1 or torch.equal(got[2], hidden)
        assert (got[0][:, index + 1 :] == POISON).all(), "later columns are untouched"
        assert torch.equal(got[1], tokens if index < num_draft_tokens - 1 else before)
    assert torch.equal(
        got[0], torch.arange(batch, device=DEVICE).unsqueeze(1) + 100 * torch.arange(num_draft_tokens, device=DEVICE)
    )
    assert bool(got[2].isfinite().all()) == (num_draft_tokens > 1)
