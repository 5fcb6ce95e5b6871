"""The index contract of a round, line by line, on what target and draft head were really called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.kv_cache import SCRATCH_PAGE
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.results import RoundRecord
from spec_lab.core.types import AcceptanceInputs, AttentionMetadata, Request, Verification
from spec_lab.engine import accounts
from spec_lab.engine.engine import Engine
from spec_lab.engine.pages import PageTable
from spec_lab.engine.slots import SlotState
from tests.fake_target import PaddedGraph, ScriptedDrafter, make_fake_engine
from tests.lab import make_config, make_engine, make_pair
from tests.layer_rows import count_rows
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_mtp import make_tiny_mtp

K, N, PAGE_SIZE = 3, 4, 4
SCRIPT = [[1, 4], [4, 2], [3, 3], [2, 1], [4, 4]]


@dataclass
class Call:
    """One forward: a request a row, with [batch, num_queries] tokens, positions and cache slots, and [batch]
    lengths.
    """

    token_ids: list[list[int]]
    positions: list[list[int]]
    slots: list[list[int]]
    seq_lens: list[int]


def call_of(token_ids: torch.Tensor, attention: AttentionMetadata) -> Call:
    def table(flat: torch.Tensor) -> list[list[int]]:
        rows: list[list[int]] = flat.view(-1, attention.num_queries).tolist()
        return rows

    lens = attention.seq_lens.tolist()
    return Call(table(token_ids), table(attention.positions), table(attention.slot_mapping), lens)


@dataclass
class ForcedRule(StrictAcceptance):
    """A rule that emits n of the script whatever the target says, drafts first, so that every n comes up."""

    script: list[list[int]]
    rounds: int = 0

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        logits, draft_tokens, num_active = inputs.logits, inputs.draft_tokens, int(inputs.active.sum())
        num_emitted = torch.zeros(len(logits), dtype=torch.int64)
        num_emitted[:num_active] = torch.tensor(self.script[self.rounds % len(self.script)][:num_active])
        self.rounds += 1
        tokens = logits.argmax(dim=-1)
        keep = torch.arange(draft_tokens.shape[1]) < (num_emitted - 1).unsqueeze(1)
        tokens[:, :-1] = torch.where(keep, draft_tokens, tokens[:, :-1])
        return Verification(tokens, num_emitted)


@dataclass
class Recorded:
    """The calls of one round, with L, n and the host's view of each request at its start."""

    kv_lens: list[int]
    texts: list[list[int]]
    pages: list[list[int]]
    verify: Call
    num_emitted: list[int] = field(default_factory=list)
    emitted: list[list[int]] = field(default_factory=list)
    drafter: list[Call] = field(default_factory=list)
    live_lens: list[int] = field(default_factory=list)


def record_rounds(pair: tuple[Path, Path], prune: str, bucket: int = 1, **cache: Any) -> tuple[list[Recorded], Engine]:
    """Run two requests through rounds of the script; a prompt of one token is among them."""
    requests = [Request("a", "x", (17,), 16, ignore_eos=True), Request("b", "x", tuple(range(20, 31)), 14, None, True)]
    options = {"page_size": PAGE_SIZE, "prefill_chunk": 4} | cache
    engine = make_engine(make_config(pair, "eagle3", K, prune, batch_size=2, cache=options), requests)
    engine.graph = PaddedGraph(bucket)
    parts = engine.parts
    rounds: list[Recorded] = []
    target: Any = parts.target
    drafter: Any = parts.drafter
    head = drafter.head
    decode_round: Any = engine.round
    target_forward, head_forward, catch_up, run = target.forward, head.forward, drafter.catch_up, decode_round.run
    in_round = False

    def on_run(batch: Any) -> Verification:
        nonlocal in_round
        in_round = True
        verification: Verification = run(batch)
        in_round = False
        return verification

    def on_target(token_ids: torch.Tensor, at: Any, *rest: Any) -> Any:
        if in_round:
            sequences = [s for s in engine.scheduler.running if not s.is_prefilling]
            rounds.append(
                Recorded(
                    [s.kv_len for s in sequences],
                    [list(s.tokens) for s in sequences],
                    [s.pages for s in sequences],
                    call_of(token_ids, at.metadata),
                )
            )
        return target_forward(token_ids, at, *rest)

    def on_head(token_ids: torch.Tensor, hidden: torch.Tensor, at: Any) -> Any:
        if in_round:
            rounds[-1].drafter.append(call_of(token_ids, at.metadata))
            live = at.kept.metadata
            if live is not None:
                rounds[-1].live_lens = live.seq_lens.tolist()
        return head_forward(token_ids, hidden, at)

    def on_catch_up(verified: Any) -> Any:
        rounds[-1].num_emitted = verified.verification.num_emitted.tolist()
        rounds[-1].emitted = verified.verification.tokens.tolist()
        return catch_up(verified)

    target.forward, head.forward, drafter.catch_up, decode_round.run = on_target, on_head, on_catch_up, on_run
    parts.rule = ForcedRule(SCRIPT)
    engine.generate(requests)
    return rounds, engine


@pytest.fixture(scope="module", params=["none", "post_attention", "catchup"])
def rounds(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> list[Recorded]:
    recorded, _ = record_rounds(pair, request.param)
    assert {n for r in recorded for n in r.num_emitted} == {1, 2, 3, 4}
    return recorded


def slots_of(pages: list[int], positions: list[int]) -> list[int]:
    return [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]


def test_verify_rows_hold_the_pending_token_and_the_drafts_at_positions_l_to_l_plus_k(rounds: list[Recorded]) -> None:
    for recorded in rounds:
        for row, kv_len in enumerate(recorded.kv_lens):
            assert len(recorded.texts[row]) == kv_len + 1
            assert recorded.verify.token_ids[row][0] == recorded.texts[row][-1]
            assert recorded.verify.positions[row] == list(range(kv_len, kv_len + N))
            assert recorded.verify.seq_lens[row] == kv_len + N
            assert recorded.verify.slots[row] == slots_of(recorded.pages[row], recorded.verify.positions[row])


def test_l_grows_by_n_and_the_last_emitted_token_is_pending(rounds: list[Recorded]) -> None:
    for before, after in pairwise(rounds):
        if len(before.kv_lens) != len(after.kv_lens):
            continue
        for row, n in enumerate(before.num_emitted):
            assert after.kv_lens[row] == before.kv_lens[row] + n
            assert after.texts[row] == before.texts[row] + before.emitted[row][:n]


def test_catchup_rows_stand_at_l_to_l_plus_k_and_pair_the_next_token(rounds: list[Recorded]) -> None:
    """The drafter's row at position p holds t[p + 1], in slot p of its own cache."""
    for recorded in rounds:
        catchup = recorded.drafter[0]
        for row, kv_len in enumerate(recorded.kv_lens):
            n = recorded.num_emitted[row]
            assert catchup.positions[row] == list(range(kv_len, kv_len + N))
            assert catchup.slots[row] == slots_of(recorded.pages[row], catchup.positions[row])
            text = recorded.texts[row] + recorded.emitted[row][:n]
            assert catchup.token_ids[row][:n] == text[kv_len + 1 : kv_len + 1 + n]


def test_the_live_query_sees_l_plus_n_keys(pair: tuple[Path, Path]) -> None:
    rounds, _ = record_rounds(pair, "catchup")
    for recorded in rounds:
        expected = [kv_len + n for kv_len, n in zip(recorded.kv_lens, recorded.num_emitted, strict=True)]
        assert recorded.live_lens == expected, "trimmed from L + N by N - n"


def test_recurrent_step_i_writes_position_l_plus_n_minus_1_plus_i_at_length_l_plus_n_plus_i(
    rounds: list[Recorded],
) -> None:
    for recorded in rounds:
        assert len(recorded.drafter) == K
        for step, call in enumerate(recorded.drafter[1:], start=1):
            for row, (kv_len, n) in enumerate(zip(recorded.kv_lens, recorded.num_emitted, strict=True)):
                assert call.positions[row] == [kv_len + n - 1 + step]
                assert call.seq_lens[row] == kv_len + n + step
                assert call.slots[row] == slots_of(recorded.pages[row], call.positions[row])


def test_the_drafts_of_a_round_are_verified_in_the_next(rounds: list[Recorded]) -> None:
    """Step i is fed draft i, and all K stand in the next verify rows."""
    for before, after in pairwise(rounds):
        if len(before.kv_lens) != len(after.kv_lens):
            continue
        for row in range(len(before.kv_lens)):
            fed = [call.token_ids[row][0] for call in before.drafter[1:]]
            assert after.verify.token_ids[row][1:K] == fed


def test_the_drafter_writes_up_to_l_plus_2k_minus_1_and_no_further(rounds: list[Recorded]) -> None:
    """With n = N the last recurrent step stands there; the reserve to L + 2K holds it in the request's own pages."""
    furthest = set()
    for recorded in rounds:
        for row, kv_len in enumerate(recorded.kv_lens):
            positions = [p for call in recorded.drafter for p in call.positions[row]]
            furthest.add(max(positions) - kv_len)
            written = {slot // PAGE_SIZE for call in recorded.drafter for slot in call.slots[row]}
            assert written <= set(recorded.pages[row])
    assert max(furthest) == 2 * K - 1


@pytest.mark.parametrize("prune", ["none", "catchup"])
def test_padded_rows_write_to_scratch_only(pair: tuple[Path, Path], prune: str) -> None:
    rounds, engine = record_rounds(pair, prune, bucket=4)
    for recorded in rounds:
        num_active = len(recorded.kv_lens)
        assert recorded.num_emitted[num_active:] == [0] * (4 - num_active)
        for call in (recorded.verify, *recorded.drafter):
            for row in range(num_active, 4):
                assert {slot // PAGE_SIZE for slot in call.slots[row]} == {SCRATCH_PAGE}
                assert call.seq_lens[row] >= 1 and min(call.positions[row]) >= 0
        assert all(length >= 1 for length in recorded.live_lens)
    assert int(engine.parts.slots.kv_lens[engine.parts.slots.table.scratch_slot]) == 0


def test_at_the_maximum_length_positions_are_clamped_and_writes_go_to_scratch(tmp_path: Path) -> None:
    """A request fills a target of 27 positions: the last rounds reach past every table."""
    pair = make_pair(tmp_path, max_position_embeddings=27)
    request = Request("a", "x", tuple(range(20, 31)), 16, ignore_eos=True)
    config = make_config(pair, "eagle3", 5, "catchup", cache={"page_size": PAGE_SIZE})
    engine = make_engine(config, [request])
    plain = make_engine(make_config(pair, "none"), [request]).generate([request])
    positions: list[int] = []
    target: Any = engine.parts.target
    drafter: Any = engine.parts.drafter

    def noting(rows: Any) -> Any:
        def noted(row_positions: torch.Tensor) -> Any:
            positions.extend(row_positions.tolist())
            return rows(row_positions)

        return noted

    for table in (*target.rotary_tables, drafter.head.rotary):
        table.rows = noting(table.rows)
    result = engine.generate([request])
    assert result.requests[0].output_ids == plain.requests[0].output_ids
    assert max(positions) == 26 and positions.count(26) > 2


def ended(slot: int, kv_len: int, token: int) -> PromptEnds:
    """The end of one prompt, whose rows nobody looks at here."""
    nobody: Any = None
    return PromptEnds(torch.tensor([slot]), torch.tensor([kv_len]), torch.tensor([token]), nobody, kv_len)


def test_the_engine_clears_before_it_assigns() -> None:
    """What an aborted or foreign user left in a slot is gone when the request's prompt pass starts."""
    engine, target = make_fake_engine(lambda target: ScriptedDrafter(K, target, [2]), num_slots=1)
    engine.parts.slots.kv_lens[0] = 17
    engine.parts.slots.table.pages[0].fill_(3)
    request = Request("a", "x", (5, 6, 7), 9)
    assert engine.generate([request]).requests[0].output_ids == target.expected(request)


def test_commit_moves_l_by_n_and_leaves_inactive_rows() -> None:
    slots = SlotState(3, K, PageTable(3, 20, PAGE_SIZE, torch.device("cpu")))
    for slot, kv_len in ((0, 5), (1, 8), (2, 3)):
        slots.start(ended(slot, kv_len, 9), torch.tensor([[1, 1, 1]]))
    batch = slots.batch(slots.ids([2, 0], padded_size=4), max_kv_len=5)
    assert batch.slot_ids.tolist() == [2, 0, 3, 3] and batch.active.tolist() == [True, True, False, False]
    assert batch.kv_lens.tolist() == [3, 5, 0, 0] and batch.num_rows == 4 and batch.max_kv_len == 5
    tokens = torch.tensor([[21, 22, 23, 24], [31, 32, 33, 34], [7, 7, 7, 7], [8, 8, 8, 8]])
    drafts = torch.tensor([[41, 42, 43], [51, 52, 53], [0, 0, 0], [0, 0, 0]])
    slots.commit(batch, Verification(tokens, torch.tensor([4, 2, 0, 0])), drafts)
    assert slots.kv_lens.tolist() == [7, 8, 7, 0]
    assert slots.input_ids[2].tolist() == [24, 41, 42, 43]
    assert slots.input_ids[0].tolist() == [32, 51, 52, 53]
    assert slots.input_ids[1].tolist() == [9, 1, 1, 1]


@pytest.mark.parametrize("looks_at_lengths", [False, True])
def test_a_record_is_made_when_the_next_round_has_been_launched(
    looks_at_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is between two rounds is what decides about the second, and all of it where that one asks for lengths."""
    engine, _ = make_fake_engine(lambda target: ScriptedDrafter(2, target, [0]))
    engine.graph.looks_at_lengths = looks_at_lengths
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(engine.graph, "run", noted("run", engine.graph.run))
    monkeypatch.setattr(accounts, "RoundRecord", noted("record", RoundRecord))
    result = engine.generate([Request("a", "x", (5, 6, 7), 4, ignore_eos=True)])
    assert seen == (["run", "record"] * 3 if looks_at_lengths else ["run", "run", "record", "run", "record", "record"])
    assert sum(record.seconds for record in result.rounds) + result.prefills[0].seconds <= result.seconds


@pytest.mark.parametrize(
    ("prune", "bucket", "computed"),
    [
        ("none", 1, (4, 4, 4)),
        ("none", 4, (16, 16, 16)),
        ("post_attention", 1, (4, 1, 1)),
        ("catchup", 1, (1, 1, 1)),
        ("catchup", 2, (2, 2, 2)),
    ],
)
def test_catchup_rows_are_counted_as_they_were_computed(
    pair: tuple[Path, Path], prune: str, bucket: int, computed: tuple[int, int, int]
) -> None:
    """Those that attend, and those that the two products behind attention compute."""
    request = Request("a", "x", (5, 6, 7), 9, ignore_eos=True)
    engine = make_engine(make_config(pair, "eagle3", K, prune), [request])
    engine.graph = PaddedGraph(bucket)
    layer = count_rows(engine.parts.drafter.head.layer)  # type: ignore[attr-defined]
    rows = [record.rows for record in engine.generate([request]).rounds]
    counted = {(each.catchup_attention, each.catchup_output, each.catchup_mlp, each.catchup_live) for each in rows}
    assert counted == {(*computed, 1)}
    # The prompt's call is the first, and K - 1 steps stand behind it and behind each catch-up.
    calls = layer.attended[K::K], layer.projected[K::K], layer.mlp[K::K]
    assert calls == tuple([count] * len(rows) for count in computed)


@pytest.mark.parametrize(
    ("prune", "bucket", "prompt", "computed"),
    [("none", 1, 3 + 7 + 8, 15), ("none", 4, 3 + 7 + 8, 60), ("catchup", 1, 3, 3), ("catchup", 2, 3, 6)],
)
def test_catchup_rows_are_counted_for_each_pass(
    tmp_path: Path, prune: str, bucket: int, prompt: int, computed: int
) -> None:
    """The modules of vanilla MTP carry N, N + 1 and N + 2 rows, of which one is live; their layers see as many.

    A prompt of three tokens goes through each module, and behind it K + i rows through every one but the first.
    """
    target, modules = tmp_path / "target", tmp_path / "modules"
    make_tiny_target(target, "qwen3")
    make_tiny_mtp(modules, "ours", read_model_config(target), num_modules=K)
    request = Request("a", "x", (5, 6, 7), 9, ignore_eos=True)
    engine = make_engine(make_config((target, modules), "mtp_vanilla", K, prune), [request])
    engine.graph = PaddedGraph(bucket)
    layers = [count_rows(module.layer) for module in engine.parts.drafter.modules]  # type: ignore[attr-defined]
    result = engine.generate([request])
    assert {(r.rows.catchup_mlp, r.rows.catchup_live) for r in result.rounds} == {(computed, K)}
    assert sum(sum(rows.mlp) for rows in layers) == prompt + computed * len(result.rounds)
