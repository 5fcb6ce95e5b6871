"""The kernel that notes how sure a drafter is; what it notes: `test_operators.py`."""

from __future__ import annotations

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.operators.kernel_set import KernelSet
from spec_lab.operators.triton_set import TRITON_FUNCTIONS
from tests.kernel_lab import DEVICE

NUM_SLOTS = 9
TRITON = KernelSet(TRITON_FUNCTIONS)


def test_a_probability_that_is_none_ends_drafting() -> None:
    """A padded row of NaN, which nothing else may notice; and a request gone NaN."""
    kept = DraftConfidences(NUM_SLOTS, 2, DEVICE, 0.5, TRITON)
    kept.begin(torch.tensor([NUM_SLOTS, 2, 3], device=DEVICE), torch.tensor([1.0, float("nan"), 0.5], device=DEVICE))
    assert kept.num_going_on.tolist() == [1]
