"""The kernels of gated delta nets, against their torch forms: inputs, rule, replay, and the norm behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

from spec_kernels.delta_chunks import CHUNK, VALUE_TILE, delta_chunks
from spec_kernels.delta_inputs import delta_inputs
from spec_kernels.delta_kept import keep_delta_rows
from spec_kernels.delta_rule import Rows, delta_replay, delta_rule
from spec_kernels.gated_norm import gated_norm
from spec_kernels.utils import INTERPRETED
from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentRows
from spec_lab.models.delta_caches import ReplayedUpdates
from spec_lab.models.delta_rule import DeltaRows, delta_row_by_row
from spec_lab.models.delta_steps import DeltaNetWeights, TorchDeltaSteps
from tests.kernel_lab import DEVICE, DTYPES, TOLERANCE, assert_near, randn

NUM_SLOTS, MOST_ROWS = 5, 6
TF32 = 1e-4 if INTERPRETED else 5e-3
"""How far products of the tensor cores may be off, which the interpreter does exactly."""


def sizes_of(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, history: int) -> DeltaNetSizes:
    return DeltaNetSizes(num_key_heads, num_value_heads, key_dim, value_dim, history + 1)


GROUPED, ALONE = sizes_of(2, 4, 12, 20, 3), sizes_of(3, 3, 16, 8, 1)
"""Value heads of which several share a key head, and dimensions that are no powers of two."""
WHOLE = sizes_of(1, 2, 128, 2 * VALUE_TILE, 3)
"""Heads of Qwen3.5-9B's keys, and of as many values as two tiles of a chunk have: smaller heads have narrower tiles."""


@dataclass
class Inputs:
    """What `delta_inputs` reads, and the windows that it writes."""

    weights: DeltaNetWeights
    projected: torch.Tensor
    windows: torch.Tensor
    slots: RecurrentRows

    @classmethod
    def random(
        cls, sizes: DeltaNetSizes, slots: list[int], num_rows: int, dtype: torch.dtype, is_prompt: bool = False
    ) -> Inputs:
        committed = [0] * len(slots) if is_prompt else [slot % MOST_ROWS for slot in slots]
        heads = sizes.num_value_heads
        weights = DeltaNetWeights(
            sizes,
            conv_weight=randn(sizes.conv_size, sizes.kernel_size, seed=3),
            rate=randn(heads, seed=4).exp(),
            time_bias=randn(heads, seed=5),
            norm_weight=torch.empty(0),
            eps=0.0,
        )
        return cls(
            weights,
            randn(len(slots), num_rows, sum(sizes.projected_sizes), seed=2, dtype=dtype),
            randn(NUM_SLOTS + 1, sizes.history + MOST_ROWS - 1, sizes.conv_size, seed=1, dtype=dtype),
            RecurrentRows(torch.tensor(slots, device=DEVICE), torch.tensor(committed, device=DEVICE), is_prompt),
        )

    def run(self) -> tuple[torch.Tensor, ...]:
        """Return `mixed`, `log_decay`, `strength` and the windows afterwards."""
        windows, slots, weights = self.windows.clone(), self.slots, self.weights
        read = self.projected, weights.conv_weight, weights.rate, weights.time_bias
        heads = weights.sizes.num_key_heads, weights.sizes.key_head_dim
        return *delta_inputs(windows, *read, slots.slot_ids, slots.committed, *heads, slots.is_prompt), windows

    def in_torch(self) -> tuple[torch.Tensor, ...]:
        windows = self.windows.clone()
        rows = TorchDeltaSteps(self.weights).inputs(self.projected, ConvWindows(windows), self.slots)
        mixed = torch.cat([part.flatten(2) for part in (rows.queries, rows.keys, rows.values)], dim=2)
        return mixed, rows.log_decay, rows.strength, windows


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
def test_inputs_equal_those_of_torch(
    sizes: DeltaNetSizes, slots: list[int], num_rows: int, dtype: torch.dtype, is_prompt: bool
) -> None:
    """Of verify, and of prompts in chunks shorter than the convolution looks back, and of several tiles of rows."""
    given = Inputs.random(sizes, slots, num_rows, dtype, is_prompt)
    (*got, windows), (*expected, windows_expected) = given.run(), given.in_torch()
    for part, part_expected in zip(got, expected, strict=True):
        assert_close(part, part_expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(windows, windows_expected), "columns behind the kept ones as well"


def test_inputs_of_a_row_do_not_depend_on_what_is_beside_it() -> None:
    """Not on the rows behind it, on other requests, or on its place in a prompt."""
    many = Inputs.random(GROUPED, [4, 1, 3], 6, torch.float32)
    expected = many.run()
    for num_rows in (1, 3):
        few = Inputs.random(GROUPED, [1], num_rows, torch.float32)
        few.projected = many.projected[1:2, :num_rows].contiguous()
        assert all(torch.equal(got[0], all_[1, :num_rows]) for got, all_ in zip(few.run()[:3], expected, strict=False))
    long = Inputs.random(GROUPED, [2], 40, torch.float32, is_prompt=True)
    mixed, *_, windows_of_whole = long.run()
    windows = long.windows
    for start, stop in ((0, 7), (7, 9), (9, 40)):
        got, *_, windows = replace(long, projected=long.projected[:, start:stop].contiguous(), windows=windows).run()
        assert torch.equal(got, mixed[:, start:stop])
    assert torch.equal(windows[2, :3], windows_of_whole[2, :3])


@dataclass
class Rule:
    """What `delta_rule` reads, and the states that it writes."""

    sizes: DeltaNetSizes
    states: torch.Tensor
    rows: Rows

    @classmethod
    def random(cls, sizes: DeltaNetSizes, slots: list[int], num_rows: int) -> Rule:
        batch, heads = len(slots), sizes.num_value_heads
        key_shape = batch, num_rows, sizes.num_key_heads, sizes.key_head_dim
        queries, keys = (normalize(randn(*key_shape, seed=seed), dim=-1).flatten(2) for seed in (1, 2))
        mixed = torch.cat((queries, keys, randn(batch, num_rows, sizes.value_size, seed=3)), dim=-1)
        gates = -randn(batch, num_rows, heads, seed=5).exp(), randn(batch, num_rows, heads, seed=6).sigmoid()
        places = torch.tensor(slots, device=DEVICE), torch.tensor([slot % MOST_ROWS for slot in slots], device=DEVICE)
        return cls(sizes, randn(NUM_SLOTS + 1, MOST_ROWS, *sizes.state_shape, seed=4), (mixed, *gates, *places))

    @property
    def slots(self) -> torch.Tensor:
        return self.rows[3]

    def run(self, is_prompt: bool = False) -> torch.Tensor:
        return delta_rule(self.states, *self.rows, self.sizes.num_key_heads, is_prompt)

    def in_chunks(self) -> torch.Tensor:
        return delta_chunks(self.states, *self.rows, self.sizes.num_key_heads)

    def in_torch(self, is_prompt: bool = False) -> torch.Tensor:
        """Run the rule of torch, row by row."""
        outputs = []
        for row, (output, state) in enumerate(delta_row_by_row(self.heads, self.states[self.slots, self.rows[4]])):
            self.states[self.slots, 0 if is_prompt else row] = state
            outputs.append(output)
        return torch.stack(outputs, dim=1)

    @property
    def heads(self) -> DeltaRows:
        sizes, (mixed, log_decay, strength, *_) = self.sizes, self.rows
        parts = mixed.split((sizes.key_size, sizes.key_size, sizes.value_size), dim=-1)
        numbers = sizes.num_key_heads, sizes.num_key_heads, sizes.num_value_heads
        queries, keys, values = (part.unflatten(-1, (number, -1)) for part, number in zip(parts, numbers, strict=True))
        return DeltaRows(queries, keys, values, log_decay, strength)

    def cut(self, start: int, stop: int) -> Rule:
        """Only some rows, over the same states."""
        mixed, log_decay, strength = (part[:, start:stop].contiguous() for part in self.rows[:3])
        return Rule(self.sizes, self.states, (mixed, log_decay, strength, *self.rows[3:]))


@pytest.mark.parametrize(
    ("sizes", "slots", "num_rows", "is_prompt"),
    [(GROUPED, [4, 1, 0], 4, False), (ALONE, [3, 2], 6, False), (ALONE, [5], 1, True), (GROUPED, [2], 5, True)],
)
def test_the_rule_equals_that_of_torch(sizes: DeltaNetSizes, slots: list[int], num_rows: int, is_prompt: bool) -> None:
    """Outputs, the states written, and those that are left alone."""
    got, expected = (Rule.random(sizes, slots, num_rows) for _ in range(2))
    assert_near(got.run(is_prompt), expected.in_torch(is_prompt))
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
def test_the_rule_in_chunks_equals_that_of_torch(sizes: DeltaNetSizes, slots: list[int], num_rows: int) -> None:
    """States that others have kept, and rows of theirs behind the first, are left alone. The tiles and warps are those
    that a run has, but for heads that are smaller than a tile."""
    got, expected = (Rule.random(sizes, slots, num_rows) for _ in range(2))
    begun = got.states.clone()
    assert_close(got.in_chunks(), expected.in_torch(True), rtol=TF32, atol=TF32)
    assert_close(got.states[slots, 0], expected.states[slots, 0], rtol=TF32, atol=TF32)
    begun[slots, 0] = got.states[slots, 0]
    assert torch.equal(got.states, begun)


@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -30.0])
def test_keys_that_are_all_alike_make_no_chunk_inexact(log_decay: float) -> None:
    """Powers of such a system grow most, and with a decay of exp(-30) nothing of a row reaches the next one."""
    got, expected = (Rule.random(GROUPED, [4, 1], 2 * CHUNK) for _ in range(2))
    for rule in (got, expected):
        rule.rows[0][...] = rule.rows[0][:, :1]
        rule.rows[1].fill_(log_decay)
        rule.rows[2].fill_(1.0)
    assert_close(got.in_chunks(), expected.in_torch(True), rtol=10 * TF32, atol=10 * TF32)
    assert_close(got.states[[4, 1], 0], expected.states[[4, 1], 0], rtol=10 * TF32, atol=10 * TF32)


@pytest.mark.parametrize("sizes", [GROUPED, WHOLE], ids=["narrow", "whole"])
def test_a_prompt_cut_between_chunks_has_the_same_bits(sizes: DeltaNetSizes) -> None:
    whole, parts = Rule.random(sizes, [4], 3 * CHUNK + 7), []
    divided = replace(whole, states=whole.states.clone())
    out = whole.in_chunks()
    for start, stop in ((0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, 3 * CHUNK + 7)):
        part = divided.cut(start, stop)
        parts.append(part.in_chunks())
        divided.rows[4].zero_()
    assert torch.equal(torch.cat(parts, dim=1), out)
    assert torch.equal(divided.states[4, 0], whole.states[4, 0])


def test_a_row_of_the_rule_does_not_depend_on_what_is_beside_it() -> None:
    many = Rule.random(GROUPED, [4, 1, 3], 6)
    begun, out = many.states.clone(), many.run()
    for num_rows in (1, 2, 5):
        few = replace(many.cut(0, num_rows), states=begun.clone())
        assert torch.equal(few.run(), out[:, :num_rows])
        assert torch.equal(few.states[:, :num_rows][few.slots], many.states[:, :num_rows][few.slots])
    prompt = replace(many, states=begun)
    assert torch.equal(prompt.run(True), out), "a prompt's rows are those of verify"
    assert torch.equal(prompt.states[prompt.slots, 0], many.states[many.slots, 5])


def kept_rows(sizes: DeltaNetSizes) -> list[torch.Tensor]:
    """Rows of every slot, of which those of the scratch slot are large."""
    heads = (NUM_SLOTS + 1, MOST_ROWS, sizes.num_value_heads)
    keys = normalize(randn(NUM_SLOTS + 1, MOST_ROWS, sizes.num_key_heads, sizes.key_head_dim, seed=7), dim=-1)
    gates = (-randn(*heads, seed=9).exp(), randn(*heads, seed=10).sigmoid())
    return [keys, randn(*heads, sizes.value_head_dim, seed=8), *gates]


@pytest.mark.parametrize(
    ("sizes", "slots", "num_rows"),
    [(GROUPED, [4, 1], 4), (ALONE, [5], 1), (GROUPED, [2], 6)],
)
def test_replay_equals_that_of_torch(sizes: DeltaNetSizes, slots: list[int], num_rows: int) -> None:
    """Each slot does again as many rows as were accepted, and keeps the new ones; nothing behind them is read."""
    rule, kept = Rule.random(sizes, slots, num_rows), kept_rows(sizes)
    for slot, committed in zip(slots, rule.rows[4].tolist(), strict=True):
        for part in kept:
            part[slot, committed + 1 :] = float("nan")
    plain = ReplayedUpdates(sizes, NUM_SLOTS, MOST_ROWS, torch.float32, DEVICE)
    plain.states = rule.states[:, 0].clone()
    plain.keys, plain.values, plain.log_decay, plain.strength = (part.clone() for part in kept)
    state = rule.states[:, 0].clone()
    out = delta_replay(state, *rule.rows, *kept)
    assert_near(out, plain.verify(rule.heads, RecurrentRows(rule.slots, rule.rows[4], False)))
    assert_near(state, plain.states)
    keep_delta_rows(*kept, *rule.rows[:4])
    for part, expected in zip(kept, (plain.keys, plain.values, plain.log_decay, plain.strength), strict=True):
        assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


def test_replaying_gives_the_bits_of_the_states_that_were_kept() -> None:
    """Two rounds either way: the second's outputs are equal, bit for bit."""
    sizes, slots = GROUPED, [3, 1]
    first = Rule.random(sizes, slots, 4)
    state, kept = first.states[:, 0].clone(), kept_rows(sizes)
    for part in kept:
        part.zero_()
    first.rows[4].zero_()
    delta_replay(state, *first.rows, *kept)
    keep_delta_rows(*kept, *first.rows[:4])
    first.run()
    mixed, log_decay, strength, slot_ids, _ = first.rows
    second = mixed.roll(1, 1), log_decay.roll(1, 1), strength, slot_ids, torch.tensor([2, 0], device=DEVICE)
    assert torch.equal(delta_replay(state, *second, *kept), replace(first, rows=second).run())


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_dim", "dtype"),
    [(2, 3, 20, torch.float32), *((7, 4, 128, dtype) for dtype in DTYPES[1:])],
)
def test_a_gated_norm_equals_that_of_torch(num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """With a gate that is cut out of wider rows."""
    outputs, weight = randn(num_rows, num_heads, head_dim, seed=1), randn(head_dim, seed=2, dtype=dtype)
    wide = randn(num_rows, num_heads * head_dim + 5, seed=3, dtype=dtype)
    gate = wide[:, 2 : num_heads * head_dim + 2].view(num_rows, num_heads, head_dim)
    got = gated_norm(outputs, gate, weight, 1e-6)
    none = torch.empty(0)
    plain = TorchDeltaSteps(DeltaNetWeights(GROUPED, none, none, none, weight, 1e-6))
    assert_near(got, plain.gated(outputs, gate))
    assert torch.equal(gated_norm(outputs[:1], gate[:1], weight, 1e-6), got[:1]), "a row is by itself"
