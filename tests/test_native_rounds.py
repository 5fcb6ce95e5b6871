"""kernels=native: what a round runs in one call, against torch's operators for the same."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from spec_kernels.native import build
from spec_kernels.native.rounds import commit_rows, write_strict
from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.attention.native_backend import NativeAttention
from spec_lab.build.caches import cache_row
from spec_lab.checkpoints.random_weights import random_eagle3
from spec_lab.core.kept import ALL_ROWS, Drop, Kept, LastPromptRow, PrunePolicy
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import FeatureSpec, RoundBatch, Verification, VerifiedRound
from spec_lab.drafters.confidence import ConfidentGreedyPicker
from spec_lab.drafters.picking import DraftedRows, DraftPicker, GreedyPicker
from spec_lab.drafters.recurrent import RecurrentDrafter, RecurrentState
from spec_lab.engine.drafts import Chain
from spec_lab.engine.parts import Parts
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.layer_stack import LayerStack
from spec_lab.operators.native_forwards import MAX_ROWS, NativeHeadLayer, NativeStack
from spec_lab.operators.native_set import NATIVE_FUNCTIONS, NativeDecoderLayer, native_chain, native_set
from tests.native_lane import (
    FULL,
    HIDDEN_SIZE,
    MAX_POSITIONS,
    NUM_PAGES,
    PAGE_SIZE,
    PLANS,
    Lane,
    assert_alike,
    tokens_of,
)

NATIVE = KernelSet(NATIVE_FUNCTIONS)
pytestmark = pytest.mark.skipif(build.problem() is not None, reason="needs a C compiler")


def test_all_layers_are_one_call_where_their_caches_have_one_shape() -> None:
    windowed = replace(FULL, window=5)
    turned = replace(FULL, rope=replace(FULL.rope, theta=100.0))
    other_heads = replace(FULL, num_kv_heads=1)
    tables = Lane(FULL, TORCH_FORMS).target.rotary_tables
    layers = Lane(FULL, native_set()).target.layers
    for second, num_tables, kind in (
        (windowed, 1, NativeStack),
        (turned, 2, LayerStack),
        (other_heads, 1, LayerStack),
    ):
        other = NativeDecoderLayer(layers[1].layer, replace(layers[1]._many, plan=second))
        plain = LayerStack((layers[0], other), tables * num_tables, (0, num_tables - 1))
        assert type(native_set().get(Op.STACK, plain)) is kind
    plain = LayerStack((layers[0], layers[1]._many), tables, (0, 0))
    assert native_set().get(Op.STACK, plain) is plain


def test_layers_in_one_call_are_the_layers_one_by_one() -> None:
    """Bit for bit, with what enters any of them; rows that are dropped in the last one take the other way."""
    lanes = [Lane(PLANS["qwen3"], native_set()) for _ in range(2)]
    stack = lanes[0].target._stack
    assert isinstance(stack, NativeStack)
    one_by_one = stack._plain
    tokens = tokens_of(2, 4)
    stream = lanes[0].target.embedding[tokens.flatten()]
    for start in (0, 4):
        metadata = lanes[0].metadata([start, start], 4)
        outputs = [
            runs(stream, Pass(lane.cache, metadata), (0, 1))
            for runs, lane in zip((stack, one_by_one), lanes, strict=True)
        ]
        assert torch.equal(outputs[0][0], outputs[1][0])
        assert len(outputs[0][1]) == 2 and all(map(torch.equal, outputs[0][1], outputs[1][1]))
    assert torch.equal(lanes[0].cache.kv, lanes[1].cache.kv)


class HeadLane:
    """An EAGLE-3 head beside a lane's target, with a cache of its own behind a prompt of 20 rows."""

    def __init__(self, kernels: KernelSet, **settings: bool) -> None:
        """`settings` are fields of the head's config."""
        self.lane = Lane(FULL, TORCH_FORMS)
        target = self.lane.target
        config, tensors = random_eagle3(
            replace(target.config, layers=target.config.layers * 4), 35, torch.float32, torch.device("cpu"), 1
        )
        config = replace(config, **settings)
        tensors = {name: t if t.dtype is torch.int64 else 4 * t.bfloat16().float() for name, t in tensors.items()}
        tensors["input_norm.weight"] = torch.ones(3 * HIDDEN_SIZE)  # where `norm_before_fc`
        places = target.embedding, target.embedding, self.lane.backend, MAX_POSITIONS
        self.head = Eagle3Head(config, tensors, *places, window=7, kernels=kernels)
        row = cache_row(config.layer.only_layer)
        cache = PagedKVCache([row], NUM_PAGES, PAGE_SIZE, torch.float32, torch.device("cpu"))
        self.cache = cache.layers[0]
        self.run([0, 0], 20)

    def run(self, starts: list[int], num_rows: int, kept: Kept | None = None) -> torch.Tensor:
        """Return the output of the live rows, which are all where there is no kept."""
        metadata = self.lane.metadata(starts, num_rows)
        generator = torch.Generator().manual_seed(num_rows)
        hidden = torch.randn(2 * num_rows, HIDDEN_SIZE, generator=generator)[: len(starts) * num_rows]
        tokens = tokens_of(len(starts), num_rows).flatten()
        return self.head.forward(tokens, hidden, Pass(self.cache, metadata, kept or ALL_ROWS))


@pytest.mark.parametrize("normed", [False, True])
def test_a_draft_heads_layer_and_its_input_in_one_call(normed: bool) -> None:
    lanes = [HeadLane(kernels, norm_before_residual=normed) for kernels in (TORCH_FORMS, native_set())]
    assert isinstance(lanes[1].head.run, NativeHeadLayer)
    live = torch.tensor([1, 7])
    before = Kept(Drop.BEFORE_ATTENTION, live, lanes[0].lane.metadata([21, 18], 1))
    for kept in (None, Kept(Drop.AFTER_LAYER, live), Kept(Drop.AFTER_ATTENTION, live), before):
        assert_alike(*(lane.run([20, 15], 4, kept) for lane in lanes))
    whole = lanes[1].run([20, 15], 4)[live]
    assert torch.equal(lanes[1].run([20, 15], 4, before), whole)
    assert torch.equal(lanes[1].run([15], 4), lanes[1].run([15, 15], 4)[:4])
    for lane in lanes:
        assert len(lane.run([24, 19], 2, Kept(Drop.EVERYTHING))) == 0
        lane.run([0], MAX_ROWS + 1)
    assert_alike(*(lane.cache.kv for lane in lanes))


def drafter_of(
    lane: HeadLane, num_draft_tokens: int, prune: PrunePolicy, picker: DraftPicker, kernels: KernelSet
) -> RecurrentDrafter:
    return RecurrentDrafter(
        num_draft_tokens=num_draft_tokens,
        head=lane.head,
        features=FeatureSpec(),
        cache=lane.cache,
        backend=lane.lane.backend,
        prune=prune,
        picker=picker,
        kernels=kernels,
    )


def verified_round(
    lane: Lane, kv_lens: list[int], num_emitted: list[int], num_rows: int, num_inputs: int
) -> VerifiedRound:
    """Return a round of the lane's first slots, with features [rows, num_inputs]."""
    slots = torch.arange(len(kv_lens)) % 2
    tokens = tokens_of(len(kv_lens), num_rows)
    lens = torch.tensor(kv_lens)
    batch = RoundBatch(slots, slots >= 0, lens, tokens, lane.table.pages[slots], max(kv_lens))
    features = torch.randn(len(kv_lens) * num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows))
    return VerifiedRound(batch, Verification(tokens, torch.tensor(num_emitted)), features)


@pytest.mark.parametrize("drop", [Drop.AFTER_LAYER, Drop.AFTER_ATTENTION, Drop.BEFORE_ATTENTION])
@pytest.mark.parametrize("normed", [False, True])
def test_a_catch_up_step_up_to_its_first_draft_in_one_call(drop: Drop, normed: bool) -> None:
    """The state and the KV that its parts leave, bit for bit, and torch's tokens: with all drafts accepted, a request
    that is padding, rows behind the cache's end, and a single request."""
    policy = PrunePolicy(LastPromptRow(), lambda num_requests: drop)
    lanes = [HeadLane(kernels, norm_before_residual=normed) for kernels in (native_set(), native_set(), TORCH_FORMS)]
    at_once, in_parts, by_torch = (
        drafter_of(lane, 3, policy, GreedyPicker(), kernels)
        for lane, kernels in zip(lanes, (native_set(), NATIVE, TORCH_FORMS), strict=True)
    )
    assert at_once.requirements.drafts_rest and not in_parts.requirements.drafts_rest
    for kv_lens, num_emitted in (([20, 17], [4, 0]), ([MAX_POSITIONS - 2, 24], [2, 1]), ([30], [3])):
        verified = verified_round(lanes[0].lane, kv_lens, num_emitted, 4, 3 * HIDDEN_SIZE)
        got, expected, plain = (drafter.catch_up(verified) for drafter in (at_once, in_parts, by_torch))
        assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.tokens, plain.tokens)
        assert torch.equal(got.hidden, expected.hidden)
        assert torch.equal(got.rows.kv_lens, expected.rows.kv_lens)
        for name in ("positions", "slot_mapping", "seq_lens", "page_table"):
            assert torch.equal(getattr(got.attention, name), getattr(expected.attention, name)), name
        assert got.attention.max_seq_len == expected.attention.max_seq_len
        assert torch.equal(lanes[0].cache.kv, lanes[1].cache.kv)


def test_a_catch_up_step_that_is_not_one_call_is_run_in_its_parts() -> None:
    """Where features or outputs are normed, or rows are many."""
    lane = HeadLane(native_set())
    few = verified_round(lane.lane, [20, 17], [4, 1], 4, 3 * HIDDEN_SIZE)
    many = [20] * (MAX_ROWS // 4 + 1)
    of_many = verified_round(lane.lane, many, [1] * len(many), 4, 3 * HIDDEN_SIZE)
    chain = native_chain(lane.head)
    assert chain.start(few, lane.cache, Drop.AFTER_LAYER, 3) is not None
    assert chain.start(of_many, lane.cache, Drop.AFTER_LAYER, 3) is None
    policy = PrunePolicy(LastPromptRow(), lambda num_requests: Drop.AFTER_LAYER)
    assert drafter_of(lane, 3, policy, GreedyPicker(), native_set()).catch_up(of_many).tokens.shape == (33,)
    assert native_chain(HeadLane(native_set(), norm_output=True).head) is None
    normed = native_chain(HeadLane(native_set(), norm_before_fc=True).head)
    assert normed.start(few, lane.cache, Drop.AFTER_LAYER, 3) is None


def test_all_draft_steps_in_one_call() -> None:
    """The drafts, the metadata and the KV that the steps one by one leave, a cache's end included; a head whose output
    is normed has them one by one."""
    lanes = [HeadLane(native_set()) for _ in range(2)]
    backend = lanes[0].lane.backend
    for starts in ([20, 17], [MAX_POSITIONS - 2, 30]):
        live = [lane.lane.metadata(starts, 1) for lane in lanes]
        hidden = [lane.run(starts, 1) for lane in lanes]
        tokens = lanes[0].head.greedy(hidden[0])
        expected = [tokens]
        for _ in range(3):
            backend.advance(live[0])
            hidden[0] = lanes[0].head.forward(expected[-1], hidden[0], Pass(lanes[0].cache, live[0]))
            expected.append(lanes[0].head.greedy(hidden[0]))
        drafts = native_chain(lanes[1].head).steps(tokens, hidden[1], lanes[1].cache, live[1], 4)
        assert torch.equal(drafts, torch.stack(expected, dim=1))
        for name in ("positions", "slot_mapping", "seq_lens"):
            assert torch.equal(getattr(live[0], name), getattr(live[1], name))
        assert torch.equal(lanes[0].cache.kv, lanes[1].cache.kv)


def test_only_greedy_drafts_on_fresh_metadata_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With metadata that is stale on purpose, and where picks are noted or sampled, each step runs for itself."""
    lane = HeadLane(native_set())
    prune = PrunePolicy(LastPromptRow(), lambda num_requests: Drop.AFTER_LAYER)
    pickers: list[DraftPicker] = [GreedyPicker(), ConfidentGreedyPicker(cast(DraftConfidences, None))]
    drafters = [drafter_of(lane, 2, prune, picker, native_set()) for picker in pickers]
    assert [drafter.requirements.drafts_rest for drafter in drafters] == [True, False]
    metadata = lane.lane.metadata([20], 1)
    tokens = torch.tensor([3])
    parts = cast(Parts, SimpleNamespace(drafter=drafters[0], backend=lane.lane.backend, timer=None))
    steps: list[int] = []
    monkeypatch.setattr(drafters[0], "step", lambda state, step: steps.append(step.index))
    for mover, expected in ((lane.lane.backend, []), (NativeAttention(PAGE_SIZE, MAX_POSITIONS), [1])):
        state = RecurrentState(tokens, lane.run([20], 1), metadata, DraftedRows(tokens, tokens))
        assert Chain(parts).collect(2, mover, state, nullcontext).shape == (1, 2)
        assert steps == expected


def test_numbers_that_do_not_lie_as_c_reads_them_are_refused() -> None:
    """Of another type, or with others between them: C would take its neighbours for them."""
    tokens, num_emitted = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    logits, drafts, active = torch.zeros(2, 2, 3), tokens[:, 1:], torch.ones(2, dtype=torch.bool)
    for num_drafts in (torch.ones(2, dtype=torch.int32), torch.ones(4, dtype=torch.int64)[::2]):
        with pytest.raises(ctypes.ArgumentError):
            write_strict(tokens, num_emitted, logits, drafts, active, num_drafts)
    with pytest.raises(AssertionError):
        commit_rows(num_emitted.clone(), tokens.clone(), torch.arange(2), tokens, num_emitted, drafts.int())
