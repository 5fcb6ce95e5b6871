"""Prompt lookup as one kernel and as C, against the torch operators that define it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spec_kernels import lookup
from spec_kernels.native.rounds import extend_and_look_up as in_c
from spec_lab.drafters.ngram import extend_and_look_up
from tests.kernel_lab import DEVICE

TILED = [(lookup.extend_and_look_up, DEVICE, 4), (in_c, torch.device("cpu"), None)]
"""Texts within one tile: `test_operators.py`."""
CAPACITY = 40
NUM_SLOTS = 6


@pytest.mark.parametrize(("look_up", "device", "tile"), TILED, ids=["triton", "c"])
@pytest.mark.parametrize("sizes", [(4, 2, 3), (1, 1, 1), (9, 3, 5), (2, 2, 8)], ids=str)
def test_it_is_what_torch_says(
    look_up: Callable[..., torch.Tensor],
    device: torch.device,
    sizes: tuple[int, int, int],
    tile: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged texts over three tokens, of one token up to all there is room for; rows that emit nothing, and padding
    whose slot is shared. What stands behind the known text is junk that would match."""
    monkeypatch.setattr(lookup, "_MOST_PLACES", tile)
    torch.manual_seed(sum(sizes))
    texts = torch.randint(1, 3, (NUM_SLOTS + 1, CAPACITY))
    texts[1, :20] = torch.arange(20)
    for _ in range(6):
        slots = torch.cat((torch.randperm(NUM_SLOTS)[:4], torch.tensor([NUM_SLOTS, NUM_SLOTS])))
        counts = torch.cat((torch.randint(0, 5, (4,)), torch.zeros(2, dtype=torch.int64)))
        starts = torch.cat((torch.randint(1, CAPACITY - 5, (4,)), torch.ones(2, dtype=torch.int64)))
        starts[0], starts[1] = CAPACITY - 5, 1
        tokens = torch.randint(1, 3, (6, 9))[:, ::1][:, 2:7]
        places = slots, starts, tokens, counts
        got_texts = texts.to(device)
        got = look_up(got_texts, *(part.to(device) for part in places), *sizes)
        expected = extend_and_look_up(texts, *places, *sizes)
        assert torch.equal(got.cpu(), expected)
        assert torch.equal(got_texts.cpu(), texts)
