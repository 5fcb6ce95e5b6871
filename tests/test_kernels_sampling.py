"""Sampling on the device draws what the lab's rules draw: the noise bit for bit, tokens token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from spec_kernels import noise
from spec_kernels.gumbel import sample_draft
from spec_kernels.noise_reference import Use, child, round_key, uniform
from spec_kernels.rejection import rejection_sample
from spec_kernels.vocabulary import RACE_TILE
from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.core.types import AcceptanceInputs, Request
from tests.kernel_lab import DEVICE, randn

NUM_SLOTS = 11


@triton.jit
def _hash(keys_ptr, draws_ptr, arrivals_ptr, seeds_ptr, kv_lens_ptr, USE: tl.constexpr, ROWS: tl.constexpr):
    place = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    keys = noise.round_key(tl.load(seeds_ptr + place), tl.load(kv_lens_ptr + place), rows.to(tl.int64), USE)
    tl.store(keys_ptr + place * ROWS + rows, keys)
    tl.store(draws_ptr + place * ROWS + rows, noise.uniform(keys))
    tl.store(arrivals_ptr + place * ROWS + rows, noise.arrival(keys, rows))


@pytest.mark.parametrize("use", [Use.DRAFT, Use.ACCEPT, Use.EMIT])
def test_the_noise_is_the_labs_bit_for_bit(use: Use) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789123456789], device=DEVICE)
    kv_lens = torch.tensor([0, 1, 17, 4095, 100000, 2**31], device=DEVICE)
    keys = torch.full((6, 8), -7, device=DEVICE)
    draws, arrivals = torch.full((2, 6, 8), float("nan"), dtype=torch.float64, device=DEVICE).unbind()
    _hash[(6,)](keys, draws, arrivals, seeds, kv_lens, USE=int(use), ROWS=8)
    rows = torch.arange(8, device=DEVICE)
    expected = round_key(seeds.unsqueeze(1), kv_lens.unsqueeze(1), rows, use)
    assert torch.equal(keys, expected) and torch.equal(draws, uniform(expected))
    torch.testing.assert_close(arrivals, -torch.log(uniform(child(expected, rows))), rtol=1e-14, atol=0)
    of_use = {Use.DRAFT: noise.USE_DRAFT, Use.ACCEPT: noise.USE_ACCEPT, Use.EMIT: noise.USE_EMIT}[use]
    assert of_use.value == use


def slot_seeds() -> SlotSeeds:
    seeds = SlotSeeds(NUM_SLOTS, 0, DEVICE)
    for slot in range(NUM_SLOTS):
        seeds.admit(slot, Request(str(slot), "test", (0,), max_new_tokens=1))
    return seeds


def slots_of(batch: int) -> torch.Tensor:
    return torch.tensor([4, 0, 10, 7, 2], device=DEVICE)[:batch]


# Drafts


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_padded_draft_row_is_a_token_of_the_vocabulary_and_writes_to_scratch(value: float) -> None:
    logits = randn(3, RACE_TILE + 4)
    logits[1:] = value
    slot_ids = torch.tensor([2, NUM_SLOTS, NUM_SLOTS], device=DEVICE)
    kept = torch.full((NUM_SLOTS + 1, 2, RACE_TILE + 4), 5.0, device=DEVICE)
    kv_lens, column = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.ones(1, dtype=torch.int64, device=DEVICE)
    tokens = sample_draft(kept, logits, slot_ids, slot_seeds().values, kv_lens, column, 0.7)
    assert tokens[1:].tolist() == [0, 0]
    touched = (kept != 5.0).flatten(1).any(1)
    assert touched.nonzero().flatten().tolist() == [2, NUM_SLOTS] and (kept[:, 0] == 5.0).all()


# Verification


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, closeness: float) -> AcceptanceInputs:
    """Drafts sampled from a drafter that resembles the target by `closeness`, without a third of the vocabulary."""
    batch, num_rows, vocab_size = shape
    logits = (randn(batch, num_rows + 1, vocab_size + 3, dtype=dtype) * 3)[:, 1:, :vocab_size]
    draft_logits = closeness * logits[:, :-1].float() + 0.4 * randn(batch, num_rows - 1, vocab_size, seed=3)
    draft_logits[..., 2::3] = float("-inf")
    flat = draft_logits.softmax(-1).flatten(0, 1).cpu()
    drafts = torch.multinomial(flat, 1, generator=torch.Generator().manual_seed(4)).view(batch, num_rows - 1)
    return AcceptanceInputs(
        logits=logits,
        draft_tokens=drafts.to(DEVICE),
        active=torch.arange(batch, device=DEVICE) != 1,
        slot_ids=slots_of(batch),
        kv_lens=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        draft_logits=draft_logits,
    )


def verify(
    inputs: AcceptanceInputs, method: str, seeds: SlotSeeds, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and n."""
    draft_logits = inputs.draft_logits if METHODS[method].reads_draft_logits else None
    given = inputs.logits, inputs.draft_tokens, draft_logits, inputs.active, inputs.slot_ids
    return rejection_sample(*given, seeds.values, inputs.kv_lens, temperature, inputs.num_drafts)


def test_drafts_of_the_target_itself_are_all_accepted_and_one_hot_misses_are_not() -> None:
    """q = p bit for bit: nothing is left of p - q, and every ratio is 1. A draft the target excludes never passes."""
    logits = randn(2, 4, 50)
    inputs = make_inputs((2, 4, 50), torch.float32, 1.0)
    inputs.logits, inputs.draft_logits = logits, logits[:, :-1].clone()
    seeds = slot_seeds()
    assert verify(inputs, "standard", seeds, 1.0)[1].tolist() == [4, 0]
    inputs.logits = logits.scatter(2, torch.nn.functional.pad(inputs.draft_tokens, (0, 1)).unsqueeze(2), -torch.inf)
    excluded_by_both = replace(inputs, draft_logits=inputs.logits[:, :-1])
    for given, method in ((inputs, "standard"), (inputs, "one_hot"), (excluded_by_both, "standard")):
        tokens, num_emitted = verify(given, method, seeds, 1.0)
        assert num_emitted.tolist() == [1, 0] and tokens[0, 0] != inputs.draft_tokens[0, 0]


@pytest.mark.parametrize("method", ["standard", "one_hot"])
def test_a_padded_row_of_nan_stays_in_the_vocabulary_and_alone(method: str) -> None:
    """Its neighbour is verified as if it were alone."""
    seeds, inputs = slot_seeds(), make_inputs((2, 4, RACE_TILE + 7), torch.float32, 1.0)
    inputs.kv_lens.fill_(3)
    inputs.logits = inputs.logits.clone()
    inputs.slot_ids[1] = NUM_SLOTS
    assert inputs.draft_logits is not None
    inputs.logits[1], inputs.draft_logits[1] = float("nan"), float("nan")
    tokens, num_emitted = verify(inputs, method, seeds, 0.8)
    assert num_emitted[1] == 0 and ((tokens[1] >= 0) & (tokens[1] < RACE_TILE + 7)).all()
    alone = AcceptanceInputs(
        inputs.logits[:1],
        inputs.draft_tokens[:1],
        inputs.active[:1],
        inputs.slot_ids[:1],
        inputs.kv_lens[:1],
        inputs.draft_logits[:1],
    )
    alone_tokens, alone_emitted = verify(alone, method, seeds, 0.8)
    assert torch.equal(tokens[:1], alone_tokens) and torch.equal(num_emitted[:1], alone_emitted)


def test_when_nothing_is_left_the_target_decides() -> None:
    """Real residuals vanish by rounding only, too seldom to wait for; a drafter gone NaN leaves nothing either."""
    seeds, inputs = slot_seeds(), make_inputs((3, 3, RACE_TILE + 130), torch.float32, 1.0)
    assert inputs.draft_logits is not None
    inputs.draft_logits[:] = float("nan")
    tokens, num_emitted = verify(inputs, "standard", seeds, 0.8)
    expected = RejectionAcceptance(METHODS["standard"], SamplingParams(0.8), seeds).accept(inputs)
    assert num_emitted.tolist() == [1, 0, 1] and torch.equal(tokens, expected.tokens) and (tokens[:, 0] > 0).all()
