"""The kernel that notes how sure a drafter is, over rounds of several steps."""

from __future__ import annotations

import pytest
import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.operators.triton_set import TRITON_FUNCTIONS
from tests.kernel_lab import DEVICE

NUM_SLOTS = 9
TRITON = KernelSet(TRITON_FUNCTIONS)


def slots_of(batch: int) -> torch.Tensor:
    """As many slots as there are, in no order, and padded rows behind them."""
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(batch))[:batch]
    return torch.cat((order, torch.full((batch - len(order),), NUM_SLOTS))).to(DEVICE)


def rounded(*shape: int, seed: int) -> torch.Tensor:
    """Probabilities of which many are equal, and products of them too."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 ** -torch.randint(0, 4, shape, generator=generator)).to(DEVICE)


@pytest.mark.parametrize("threshold", [None, 0.25])
@pytest.mark.parametrize("batch", [1, 5, 12])
def test_notes_are_those_of_the_reference(batch: int, threshold: float | None) -> None:
    """Two rounds of three drafts, the products at the threshold too. The scratch slot's notes are junk, and it never
    goes on; other slots stay as they are."""
    slot_ids = slots_of(batch)
    both = [DraftConfidences(NUM_SLOTS, 3, DEVICE, threshold, kernels) for kernels in (TRITON, TORCH_FORMS)]
    counts = set()
    for step in range(6):
        for kept in both:
            probabilities = rounded(batch, seed=step)
            if step % 3 == 0:
                kept.begin(slot_ids, probabilities)
            else:
                kept.go_on(slot_ids, probabilities, torch.tensor([step % 3], device=DEVICE))
        got, expected = ([kept.survival, kept.num_drafted] for kept in both)
        for mine, other in zip(got, expected, strict=True):
            assert torch.equal(mine[:-1], other[:-1])
        assert torch.equal(both[0].num_going_on, both[1].num_going_on)
        counts.add(int(both[0].num_going_on))
        assert both[0].num_drafted[slot_ids].tolist() == [step % 3 + 1] * batch
    assert (counts == {0}) == (threshold is None)
    assert batch == 1 or threshold is None or len(counts) > 2


def test_a_probability_that_is_none_ends_drafting() -> None:
    """A padded row of NaN, which nothing else may notice; and a request gone NaN."""
    kept = DraftConfidences(NUM_SLOTS, 2, DEVICE, 0.5, TRITON)
    kept.begin(torch.tensor([NUM_SLOTS, 2, 3], device=DEVICE), torch.tensor([1.0, float("nan"), 0.5], device=DEVICE))
    assert kept.num_going_on.tolist() == [1]
