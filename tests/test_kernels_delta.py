"""The kernels of gated delta nets, against their references: inputs, rule, replay, and the norm behind."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from spec_kernels.delta_chunks import CHUNK, VALUE_TILE, delta_chunks
from spec_kernels.delta_inputs import delta_inputs, delta_inputs_reference
from spec_kernels.delta_kept import keep_delta_rows, keep_delta_rows_reference
from spec_kernels.delta_reference import delta_replay_reference, delta_rule_reference
from spec_kernels.delta_rule import delta_replay, delta_rule
from spec_kernels.gated_norm import gated_norm, gated_norm_reference
from spec_kernels.utils import INTERPRETED
from tests.kernel_lab import DEVICE, DTYPES, TOLERANCE, assert_near, randn

NUM_SLOTS, MOST_ROWS = 5, 6
TF32 = 1e-4 if INTERPRETED else 5e-3
"""How far products of the tensor cores may be off, which the interpreter does exactly."""
JUNK = 1e3


@dataclass(frozen=True)
class Sizes:
    """Of one net; value heads of which several share a key head, and dimensions that are no powers of two."""

    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 12
    value_dim: int = 20
    history: int = 3

    @property
    def conv_size(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


GROUPED, ALONE = Sizes(), Sizes(num_key_heads=3, num_value_heads=3, key_dim=16, value_dim=8, history=1)
WHOLE = Sizes(num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=2 * VALUE_TILE)
"""Heads of Qwen3.5-9B's keys, and of as many values as two tiles of a chunk have: smaller heads have narrower tiles."""


@dataclass
class Inputs:
    """Arguments of `delta_inputs`."""

    mixed: torch.Tensor
    log_decay: torch.Tensor
    strength: torch.Tensor
    windows: torch.Tensor
    projected: torch.Tensor
    conv_weight: torch.Tensor
    rate: torch.Tensor
    time_bias: torch.Tensor
    slot_ids: torch.Tensor
    committed: torch.Tensor
    num_key_heads: int
    key_head_dim: int
    is_prompt: bool

    @classmethod
    def random(
        cls, sizes: Sizes, slots: list[int], num_rows: int, dtype: torch.dtype, is_prompt: bool = False
    ) -> Inputs:
        batch, heads = len(slots), sizes.num_value_heads
        width = sizes.conv_size + sizes.num_value_heads * sizes.value_dim + 2 * heads
        committed = [0] * batch if is_prompt else [slot % MOST_ROWS for slot in slots]
        return cls(
            mixed=torch.full((batch, num_rows, sizes.conv_size), JUNK, device=DEVICE),
            log_decay=torch.full((batch, num_rows, heads), JUNK, device=DEVICE),
            strength=torch.full((batch, num_rows, heads), JUNK, device=DEVICE),
            windows=randn(NUM_SLOTS + 1, sizes.history + MOST_ROWS - 1, sizes.conv_size, seed=1, dtype=dtype),
            projected=randn(batch, num_rows, width, seed=2, dtype=dtype),
            conv_weight=randn(sizes.conv_size, sizes.history + 1, seed=3),
            rate=randn(heads, seed=4).exp(),
            time_bias=randn(heads, seed=5),
            slot_ids=torch.tensor(slots, device=DEVICE),
            committed=torch.tensor(committed, device=DEVICE),
            num_key_heads=sizes.num_key_heads,
            key_head_dim=sizes.key_dim,
            is_prompt=is_prompt,
        )

    def run(self, function: Any) -> Inputs:
        """Run it on copies of what it writes."""
        copies = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("mixed", "log_decay", "strength", "windows"):
            copies[name] = copies[name].clone()
        function(**copies)
        return Inputs(**copies)


@pytest.mark.parametrize(
    ("sizes", "slots", "num_rows", "dtype", "is_prompt"),
    [
        (GROUPED, [4, 1], 4, torch.float32, False),
        (ALONE, [0, 5], 1, torch.float32, False),
        *((GROUPED, [3], 6, dtype, False) for dtype in DTYPES[1:]),
        (GROUPED, [2], 2, torch.float32, True),
        (GROUPED, [2], 1, torch.float32, True),
        (ALONE, [2], 3, torch.float32, True),
        *((GROUPED, [2], 37, dtype, True) for dtype in DTYPES[1:]),
    ],
)
def test_inputs_equal_the_reference(
    sizes: Sizes, slots: list[int], num_rows: int, dtype: torch.dtype, is_prompt: bool
) -> None:
    """Of verify, and of prompts in chunks shorter than the convolution looks back, and of several tiles of rows."""
    given = Inputs.random(sizes, slots, num_rows, dtype, is_prompt)
    got, expected = given.run(delta_inputs), given.run(delta_inputs_reference)
    tolerance = TOLERANCE[dtype]
    for name in ("mixed", "log_decay", "strength"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=tolerance, atol=tolerance)
    assert torch.equal(got.windows, expected.windows), "columns behind the kept ones as well"


def test_inputs_of_a_row_do_not_depend_on_what_is_beside_it() -> None:
    """Not on the rows behind it, on other requests, or on its place in a prompt."""
    many = Inputs.random(GROUPED, [4, 1, 3], 6, torch.float32)
    expected = many.run(delta_inputs)
    for num_rows in (1, 3):
        few = Inputs.random(GROUPED, [1], num_rows, torch.float32)
        few.projected = many.projected[1:2, :num_rows].contiguous()
        got = few.run(delta_inputs)
        for name in ("mixed", "log_decay", "strength"):
            assert torch.equal(getattr(got, name)[0], getattr(expected, name)[1, :num_rows])
    long = Inputs.random(GROUPED, [2], 40, torch.float32, is_prompt=True)
    whole, windows = long.run(delta_inputs), long.windows
    for start, stop in ((0, 7), (7, 9), (9, 40)):
        part = Inputs.random(GROUPED, [2], stop - start, torch.float32, is_prompt=True)
        part.projected, part.windows = long.projected[:, start:stop].contiguous(), windows
        got = part.run(delta_inputs)
        windows = got.windows
        assert torch.equal(got.mixed, whole.mixed[:, start:stop])
    assert torch.equal(windows[2, :3], whole.windows[2, :3])


@dataclass
class Rule:
    """Arguments of `delta_rule`, and what is kept for `delta_replay`."""

    out: torch.Tensor
    states: torch.Tensor
    mixed: torch.Tensor
    log_decay: torch.Tensor
    strength: torch.Tensor
    slot_ids: torch.Tensor
    committed: torch.Tensor

    @classmethod
    def random(cls, sizes: Sizes, slots: list[int], num_rows: int) -> Rule:
        batch, heads = len(slots), sizes.num_value_heads
        queries, keys = (
            torch.nn.functional.normalize(randn(batch, num_rows, sizes.num_key_heads, sizes.key_dim, seed=seed), dim=-1)
            for seed in (1, 2)
        )
        values = randn(batch, num_rows, heads * sizes.value_dim, seed=3)
        state = (heads, sizes.key_dim, sizes.value_dim)
        return cls(
            out=torch.full((batch, num_rows, heads, sizes.value_dim), JUNK, device=DEVICE),
            states=randn(NUM_SLOTS + 1, MOST_ROWS, *state, seed=4),
            mixed=torch.cat((queries.flatten(2), keys.flatten(2), values), dim=-1),
            log_decay=-randn(batch, num_rows, heads, seed=5).exp(),
            strength=randn(batch, num_rows, heads, seed=6).sigmoid(),
            slot_ids=torch.tensor(slots, device=DEVICE),
            committed=torch.tensor([slot % MOST_ROWS for slot in slots], device=DEVICE),
        )

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        return self.mixed, self.log_decay, self.strength, self.slot_ids, self.committed

    def first(self, num_rows: int) -> Rule:
        """Only the first rows, and states of its own."""
        cut = [part[:, :num_rows].contiguous() for part in (self.out, self.mixed, self.log_decay, self.strength)]
        return Rule(cut[0], self.states.clone(), *cut[1:], self.slot_ids, self.committed)


@pytest.mark.parametrize(
    ("sizes", "slots", "num_rows", "is_prompt"),
    [(GROUPED, [4, 1, 0], 4, False), (ALONE, [3, 2], 6, False), (ALONE, [5], 1, True), (GROUPED, [2], 5, True)],
)
def test_the_rule_equals_the_reference(sizes: Sizes, slots: list[int], num_rows: int, is_prompt: bool) -> None:
    """Outputs, the states written, and those that are left alone."""
    got, expected = (Rule.random(sizes, slots, num_rows) for _ in range(2))
    delta_rule(got.out, got.states, *got.rows, sizes.num_key_heads, is_prompt)
    delta_rule_reference(expected.out, expected.states, *expected.rows, sizes.num_key_heads, is_prompt)
    assert_near(got.out, expected.out)
    assert_near(got.states, expected.states)
    untouched = [slot for slot in range(NUM_SLOTS + 1) if slot not in slots]
    assert torch.equal(got.states[untouched], Rule.random(sizes, slots, num_rows).states[untouched])


@pytest.mark.parametrize(
    ("sizes", "slots", "num_rows"),
    [
        *((GROUPED, [4, 1], CHUNK + 5), (ALONE, [5], 3), (ALONE, [3, 2], 2 * CHUNK), (GROUPED, [2], 3 * CHUNK - 1)),
        (WHOLE, [2, 4], 2 * CHUNK + 9),
    ],
)
def test_the_rule_in_chunks_equals_the_reference(sizes: Sizes, slots: list[int], num_rows: int) -> None:
    """States that others have kept, and rows of theirs behind the first, are left alone. The tiles and warps are those
    that a run has, but for heads that are smaller than a tile."""
    got, expected = (Rule.random(sizes, slots, num_rows) for _ in range(2))
    begun = got.states.clone()
    delta_chunks(got.out, got.states, *got.rows, sizes.num_key_heads)
    delta_rule_reference(expected.out, expected.states, *expected.rows, sizes.num_key_heads, True)
    assert_close(got.out, expected.out, rtol=TF32, atol=TF32)
    assert_close(got.states[slots, 0], expected.states[slots, 0], rtol=TF32, atol=TF32)
    begun[slots, 0] = got.states[slots, 0]
    assert torch.equal(got.states, begun)


@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -30.0])
def test_keys_that_are_all_alike_make_no_chunk_inexact(log_decay: float) -> None:
    """Powers of such a system grow most, and with a decay of exp(-30) nothing of a row reaches the next one."""
    got, expected = (Rule.random(GROUPED, [4, 1], 2 * CHUNK) for _ in range(2))
    for rule in (got, expected):
        rule.mixed[...] = rule.mixed[:, :1]
        rule.log_decay.fill_(log_decay)
        rule.strength.fill_(1.0)
    delta_chunks(got.out, got.states, *got.rows, 2)
    delta_rule_reference(expected.out, expected.states, *expected.rows, 2, True)
    assert_close(got.out, expected.out, rtol=10 * TF32, atol=10 * TF32)
    assert_close(got.states[[4, 1], 0], expected.states[[4, 1], 0], rtol=10 * TF32, atol=10 * TF32)


@pytest.mark.parametrize("sizes", [GROUPED, WHOLE], ids=["narrow", "whole"])
def test_a_prompt_cut_between_chunks_has_the_same_bits(sizes: Sizes) -> None:
    whole = Rule.random(sizes, [4], 3 * CHUNK + 7)
    begun, parts = whole.states.clone(), []
    delta_chunks(whole.out, whole.states, *whole.rows, sizes.num_key_heads)
    states, committed = begun, whole.committed
    for start, stop in ((0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, 3 * CHUNK + 7)):
        given = [part[:, start:stop].contiguous() for part in (whole.out, *whole.rows[:3])]
        delta_chunks(given[0], states, *given[1:], whole.slot_ids, committed, sizes.num_key_heads)
        committed = torch.zeros_like(committed)
        parts.append(given[0])
    assert torch.equal(torch.cat(parts, dim=1), whole.out)
    assert torch.equal(states[4, 0], whole.states[4, 0])


def test_a_row_of_the_rule_does_not_depend_on_what_is_beside_it() -> None:
    many = Rule.random(GROUPED, [4, 1, 3], 6)
    one = many.first(6)
    delta_rule(many.out, many.states, *many.rows, 2, False)
    for num_rows in (1, 2, 5):
        few = one.first(num_rows)
        delta_rule(few.out, few.states, *few.rows, 2, False)
        assert torch.equal(few.out, many.out[:, :num_rows])
        assert torch.equal(few.states[:, :num_rows][few.slot_ids], many.states[:, :num_rows][few.slot_ids])
    prompt = one.first(6)
    delta_rule(prompt.out, prompt.states, *prompt.rows, 2, True)
    assert torch.equal(prompt.out, many.out), "a prompt's rows are those of verify"
    assert torch.equal(prompt.states[prompt.slot_ids, 0], many.states[many.slot_ids, 5])


def kept_rows(sizes: Sizes) -> list[torch.Tensor]:
    """Rows of every slot, of which those of the scratch slot are large."""
    heads = (NUM_SLOTS + 1, MOST_ROWS, sizes.num_value_heads)
    keys = torch.nn.functional.normalize(
        randn(NUM_SLOTS + 1, MOST_ROWS, sizes.num_key_heads, sizes.key_dim, seed=7), dim=-1
    )
    gates = (-randn(*heads, seed=9).exp(), randn(*heads, seed=10).sigmoid())
    return [keys, randn(*heads, sizes.value_dim, seed=8), *gates]


@pytest.mark.parametrize(
    ("sizes", "slots", "num_rows"),
    [(GROUPED, [4, 1], 4), (ALONE, [5], 1), (GROUPED, [2], 6)],
)
def test_replay_equals_the_reference(sizes: Sizes, slots: list[int], num_rows: int) -> None:
    """Each slot does again as many rows as were accepted, and keeps the new ones; nothing behind them is read."""
    got, expected = (Rule.random(sizes, slots, num_rows) for _ in range(2))
    kept, kept_expected = kept_rows(sizes), kept_rows(sizes)
    for slot, committed in zip(slots, got.committed.tolist(), strict=True):
        for part in (*kept, *kept_expected):
            part[slot, committed + 1 :] = float("nan")
    state, expected_state = got.states[:, 0].clone(), expected.states[:, 0].clone()
    delta_replay(got.out, state, *got.rows, *kept)
    delta_replay_reference(expected.out, expected_state, *expected.rows, *kept_expected)
    assert_near(got.out, expected.out)
    assert_near(state, expected_state)
    keep_delta_rows(*kept, *got.rows[:4])
    keep_delta_rows_reference(*kept_expected, *expected.rows[:4])
    for part, part_expected in zip(kept, kept_expected, strict=True):
        torch.testing.assert_close(part, part_expected, rtol=0, atol=0, equal_nan=True)


def test_replaying_gives_the_bits_of_the_states_that_were_kept() -> None:
    """Two rounds either way: the second's outputs are equal, bit for bit."""
    sizes, slots = GROUPED, [3, 1]
    first, second = Rule.random(sizes, slots, 4), Rule.random(sizes, slots, 4)
    second.mixed, second.log_decay = second.mixed.roll(1, 1), second.log_decay.roll(1, 1)
    begin = torch.zeros_like(first.committed)
    state, kept = first.states[:, 0].clone(), kept_rows(sizes)
    for part in kept:
        part.zero_()
    delta_replay(first.out.clone(), state, *first.rows[:4], begin, *kept)
    keep_delta_rows(*kept, *first.rows[:4])
    delta_rule(first.out, first.states, *first.rows[:4], begin, 2, False)
    accepted = torch.tensor([2, 0], device=DEVICE)
    replayed = second.out.clone()
    delta_replay(replayed, state, *second.rows[:4], accepted, *kept)
    delta_rule(second.out, first.states, *second.rows[:4], accepted, 2, False)
    assert torch.equal(replayed, second.out) and second.out.abs().max() < JUNK


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_dim", "dtype"),
    [(2, 3, 20, torch.float32), *((7, 4, 128, dtype) for dtype in DTYPES[1:])],
)
def test_a_gated_norm_equals_the_reference(num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """With a gate that is cut out of wider rows."""
    outputs, weight = randn(num_rows, num_heads, head_dim, seed=1), randn(head_dim, seed=2, dtype=dtype)
    wide = randn(num_rows, num_heads * head_dim + 5, seed=3, dtype=dtype)
    gate = wide[:, 2 : num_heads * head_dim + 2].view(num_rows, num_heads, head_dim)
    got, expected = (torch.empty(num_rows, num_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
    gated_norm(got, outputs, gate, weight, 1e-6)
    gated_norm_reference(expected, outputs, gate, weight, 1e-6)
    assert_near(got, expected)
    alone = torch.empty_like(got[:1])
    gated_norm(alone, outputs[:1], gate[:1], weight, 1e-6)
    assert torch.equal(alone, got[:1]), "a row does not depend on what is beside it"
