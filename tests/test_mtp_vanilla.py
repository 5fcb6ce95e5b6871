"""The rows, positions and caches of vanilla MTP, with modules that only write down what they are given.

Two targets: the letters of TensorRT-LLM's worked trace, and `FakeTarget`, whose hidden states can be told in plain
Python, in an engine whose rule accepts any number of drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.kv_cache import NULL_PAGE, NUM_RESERVED_PAGES, SCRATCH_PAGE, CacheRow, PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.ragged import whole_prompt
from spec_lab.core.types import (
    AcceptanceInputs,
    AttentionMetadata,
    DraftStep,
    FeatureSpec,
    NormSide,
    Request,
    RoundBatch,
    Verification,
    VerifiedRound,
)
from spec_lab.core.types import Sequence as RunningSequence
from spec_lab.drafters.mtp_vanilla import MtpVanillaDrafter, MtpVanillaState
from spec_lab.drafters.mtp_window import MtpWindow
from spec_lab.drafters.picking import GreedyPicker
from spec_lab.engine.engine import Engine
from tests.fake_target import WIDTH, WINDOWS, FakeTarget, PaddedGraph, fake_row, make_fake_engine, make_prune
from tests.lab import PRUNING
from tests.scripted_rule import ScriptedAcceptance, random_script

CPU = torch.device("cpu")
NEXT = {"e": "F", "f": "G", "g": "H", "x": "N", "n": "O", "o": "P", "k": "U", "u": "V", "v": "Q"}
POST_NORM = FeatureSpec(final_hidden=NormSide.POST_NORM)


@dataclass
class Call:
    """One forward: tokens [rows], hidden [rows, hidden_size], and what the live rows were told."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    slots: torch.Tensor
    attention: AttentionMetadata
    live: AttentionMetadata | None
    num_kept: int


@dataclass
class ModuleBase:
    """Writes (token, hidden) as (key, value), so that the cache can be read."""

    calls: list[Call] = field(default_factory=list)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        attention, kept = at.metadata, at.kept
        keys = token_ids.view(-1, 1, 1, 1).expand(-1, 1, 1, hidden.shape[1]).float()
        at.cache.kv.index_copy_(0, attention.slot_mapping, torch.cat((keys, hidden[:, None, None]), dim=1))
        call = Call(token_ids.clone(), hidden.clone(), attention.slot_mapping, attention, None, 0)
        self.calls.append(call)
        if kept.is_empty:
            return hidden[:0]
        queries, call.live = kept.queries(token_ids, attention)
        assert len(queries) == len(call.live.positions)
        out = kept.residual(self.output(token_ids, hidden))
        call.num_kept = len(out)
        return kept.live(out)

    def output(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LetterModule(ModuleBase):
    """The output of token X is h_X, written x; `NEXT` says what is drafted from it."""

    def output(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return tokens.unsqueeze(1).float() + ord("a") - ord("A")

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor([ord(NEXT[chr(int(value))]) for value in hidden[:, 0]])


def letters(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in text])


def spell(values: torch.Tensor) -> str:
    return "".join(chr(int(value)) for value in values.flatten())


class Trace:
    """Drives three letter modules for one request at slot 1 of 2, pages of 4 tokens."""

    def __init__(self, prefill: str, catchup: str) -> None:
        self.backend = TorchAttention(4, 64)
        self.modules = [LetterModule() for _ in range(3)]
        cache = PagedKVCache([CacheRow((2, 1, 1))] * 3, 12, 4, torch.float32, CPU)
        cache.kv[:, (NULL_PAGE + 1) * 4 :] = float("nan")
        self.caches = cache.layers
        self.table = torch.tensor([[5, 3, 7, 9, SCRATCH_PAGE]])
        window = MtpWindow(2, 3, 1, torch.float32, CPU)
        prune = make_prune(prefill, catchup)
        self.drafter = MtpVanillaDrafter(
            modules=self.modules,
            caches=self.caches,
            window=window,
            features=POST_NORM,
            backend=self.backend,
            prune=prune,
            picker=GreedyPicker(),
        )
        self.drafter.admit(1, Request("r", "c", (65,), 9))

    def prompt(self, text: str, sampled: str) -> str:
        features = letters(text).unsqueeze(1).float()
        state = self.drafter.ingest(
            whole_prompt(self.backend, self.table, letters(text + sampled), features, 3, slot=1)
        )
        assert state is not None
        return self._drafts(state)

    def round(self, kv_len: int, inputs: str, sampled: str, num_emitted: int) -> str:
        """Target inputs, the tokens it samples at each of them, and how many of these are emitted."""
        ids = letters(inputs).unsqueeze(0)
        batch = RoundBatch(
            torch.tensor([1]), torch.tensor([True]), torch.tensor([kv_len]), ids, self.table, max_kv_len=kv_len
        )
        verification = Verification(letters(sampled).unsqueeze(0), torch.tensor([num_emitted]))
        features = letters(inputs).unsqueeze(1).float()
        return self._drafts(self.drafter.catch_up(VerifiedRound(batch, verification, features)))

    def _drafts(self, state: MtpVanillaState) -> str:
        tokens = [state.tokens]
        for index in (1, 2):
            self.drafter.step(state, DraftStep(index, torch.tensor([index])))
            tokens.append(state.tokens)
        return spell(torch.cat(tokens))

    def rows(self, module: int) -> list[tuple[int, str]]:
        """(position, token and hidden) of the rows of the last forward that were not sent to scratch."""
        call = self.modules[module].calls[-1]
        found = []
        for slot, token, hidden in zip(call.slots.tolist(), call.tokens, call.hidden, strict=True):
            if slot // 4 != SCRATCH_PAGE:
                position = self.table[0].tolist().index(slot // 4) * 4 + slot % 4
                found.append((position, spell(token) + spell(hidden)))
        return found

    def cached(self, module: int, length: int) -> str:
        """Tokens in a module's cache, by position."""
        positions = torch.arange(length)
        slots = self.table[0, positions // 4] * 4 + positions % 4
        return spell(self.caches[module].kv[slots, 0, 0, 0])


@pytest.mark.parametrize("prune", PRUNING)
def test_worked_trace_of_the_source(prune: str) -> None:
    """TensorRT-LLM's `MTPWorker.forward`, prompt ABCD: each module's inputs, the tokens in its cache, the drafts.

    In rounds the source's rows are the last three of ours. A row reads E, H_D as "ED", and F, h_E as "Fe".
    """
    trace = Trace(*PRUNING[prune])
    assert trace.prompt("ABCD", "E") == "FGH"
    assert trace.rows(0) == [(0, "BA"), (1, "CB"), (2, "DC"), (3, "ED")]
    assert trace.rows(1) == [(0, "CB"), (1, "DC"), (2, "ED"), (3, "Fe")]
    assert trace.rows(2) == [(0, "DC"), (1, "ED"), (2, "Fe"), (3, "Gf")]

    assert trace.round(4, "EFGH", "FGXY", 3) == "NOP"
    assert trace.rows(0)[-3:] == [(4, "FE"), (5, "GF"), (6, "XG")]
    assert trace.rows(1)[-3:] == [(4, "GF"), (5, "XG"), (6, "Nx")]
    assert trace.rows(2)[-3:] == [(4, "XG"), (5, "Nx"), (6, "On")]
    assert [trace.cached(module, 7) for module in range(3)] == ["BCDEFGX", "CDEFGXN", "DEFGXNO"]

    assert trace.round(7, "XNOP", "KMZY", 1) == "UVQ"
    assert trace.rows(0)[-3:] == [(5, "GF"), (6, "XG"), (7, "KX")]
    assert trace.rows(1)[-3:] == [(5, "XG"), (6, "KX"), (7, "Uk")]
    assert trace.rows(2)[-3:] == [(5, "KX"), (6, "Uk"), (7, "Vu")]
    assert [trace.cached(module, 8) for module in range(3)] == ["BCDEFGXK", "CDEFGXKU", "DEFGXKUV"]


def test_full_acceptance_leaves_no_hole_and_no_drafted_pair() -> None:
    """The source's window would skip position 4, and leave h_E and h_F of the drafts in the later modules."""
    trace = Trace("all_rows", "none")
    trace.prompt("ABCD", "E")
    trace.round(4, "EFGH", "FGHX", 4)
    assert trace.rows(0) == [(4, "FE"), (5, "GF"), (6, "HG"), (7, "XH")]
    assert trace.rows(1) == [(3, "FE"), (4, "GF"), (5, "HG"), (6, "XH"), (7, "Nx")]
    assert trace.rows(2) == [(2, "FE"), (3, "GF"), (4, "HG"), (5, "XH"), (6, "Nx"), (7, "On")]


class NotingModule(ModuleBase):
    """A module whose output and draft are any function of the row that tells rows apart."""

    def output(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return ((hidden.round() * 3 + tokens.unsqueeze(1) + torch.arange(hidden.shape[1])) % 1009).floor()

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.nan_to_num(0.0).sum(dim=1).long() % 61


def hidden_of(text: Sequence[int]) -> torch.Tensor:
    """`FakeTarget`'s final hidden states [len(text), 2 * WIDTH], in plain Python."""
    rows = [fake_row(token, position) for position, token in enumerate(text)]
    hidden = []
    for end in range(1, len(text) + 1):
        seen = rows[:end], rows[max(0, end - (WINDOWS[0] or 0)) : end]
        hidden.append([sum(row[c] for row in part) for part in reversed(seen) for c in range(WIDTH)])
    return torch.tensor(hidden, dtype=torch.float32).view(-1, 2 * WIDTH)


class CheckingRule(ScriptedAcceptance):
    """A rule that reads windows and caches of every running request."""

    def check(self, sequence: RunningSequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        """The caches hold what a run over the whole text would have written: they do not depend on its rounds."""
        slot, text = sequence.slot, sequence.tokens
        drafter = self.engine.parts.drafter
        size = self.engine.parts.slots.table.page_size
        pages = self.engine.parts.slots.table.pages[slot]
        known, num_modules = len(text) - 1, len(drafts)
        hidden = hidden_of(text[:-1])
        window = drafter.window
        padding = max(0, num_modules - known)
        assert window.tokens[slot].tolist() == [0] * padding + text[max(0, known - num_modules) : known]
        assert window.hidden[slot, :padding].eq(0).all()
        assert torch.equal(window.hidden[slot, padding:].round(), hidden[-num_modules:])
        pairs = list(zip(text[1:], hidden, strict=True))
        for index, (module, cache) in enumerate(zip(drafter.modules, drafter.caches, strict=True)):
            positions = torch.arange(known)
            cached = cache.kv[pages[positions // size] * size + positions % size, :, 0]
            expected = pairs[index:]
            assert cached[:, 0, 0].tolist() == [token for token, _ in expected], f"module {index}"
            assert torch.equal(cached[:, 1].round(), torch.stack([state for _, state in expected]).round())
            token, newest = expected[-1]
            output = module.output(torch.tensor([token]), newest.round().unsqueeze(0))
            assert int(module.greedy(output)) == drafts[index]
            pairs.append((drafts[index], output[0]))


def make_checked_engine(
    num_modules: int, prune: str, script: Callable[[int], int], page_size: int, chunk: int, bucket: int
) -> tuple[Engine, CheckingRule, list[NotingModule]]:
    """Build an engine of three slots, whose windows and caches start as NaN."""
    num_pages = NUM_RESERVED_PAGES + 3 * 60 // page_size
    modules = [NotingModule() for _ in range(num_modules)]

    def make_drafter(target: FakeTarget) -> MtpVanillaDrafter:
        cache = PagedKVCache([CacheRow((2, 1, 2 * WIDTH))] * num_modules, num_pages, page_size, torch.float32, CPU)
        cache.kv[:, (NULL_PAGE + 1) * page_size :] = float("nan")
        window = MtpWindow(3, num_modules, 2 * WIDTH, torch.float32, CPU)
        window.tokens[:3] = -7
        window.hidden[:3] = float("nan")
        policy = make_prune(*PRUNING[prune])
        return MtpVanillaDrafter(
            modules=modules,
            caches=cache.layers,
            window=window,
            features=POST_NORM,
            backend=target.backend,
            prune=policy,
            picker=GreedyPicker(),
        )

    engine, _ = make_fake_engine(
        make_drafter,
        max_seq_len=42,
        page_size=page_size,
        num_pages=num_pages,
        prefill_chunk=chunk,
        prefill=PRUNING[prune][0],
        graph=PaddedGraph(bucket),
        max_positions=44,
    )
    rule = CheckingRule(engine, script)
    engine.parts.rule = rule
    return engine, rule, modules


def requests_of(prompt_lengths: Sequence[int]) -> list[Request]:
    """Make requests, of which the longest reaches the end of the cache."""
    generator = random.Random(0)
    return [
        Request(
            f"r{index}",
            "c",
            tuple(generator.randrange(3, 61) for _ in range(length)),
            min(17, 42 - length),
            ignore_eos=True,
        )
        for index, length in enumerate(prompt_lengths)
    ]


LENGTHS = (1, 25, 2, 3, 9, 1, 4, 30, 5, 2)
# num_modules, prune, page_size, chunk, bucket
CASES = [
    (1, "none", 4, 512, 1),
    (1, "catchup", 1, 1, 4),
    (2, "catchup", 16, 5, 4),
    (3, "none", 1, 2, 4),
    (3, "prefill", 4, 5, 4),
    (3, "post_attention", 16, 1, 1),
    (4, "catchup", 4, 1, 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_caches_depend_on_the_text_alone(case: tuple[int, str, int, int, int]) -> None:
    """Batches are ragged, slots reused, prompts have 1 token and up in chunks; every n, page borders and the last
    position occur.
    """
    num_modules, prune, page_size, chunk, bucket = case
    engine, rule, _ = make_checked_engine(num_modules, prune, random_script(), page_size, chunk, bucket)
    engine.generate(requests_of(LENGTHS))
    assert set(rule.accepted) == set(range(num_modules + 1)) and len(rule.accepted) > 50
    window = engine.parts.drafter.window
    assert window.tokens[3].eq(0).all() and window.hidden[3].eq(0).all(), "padded rows leave the scratch slot alone"


@pytest.mark.parametrize("num_accepted", [0, 3])
def test_all_and_none_accepted(num_accepted: int) -> None:
    engine, rule, _ = make_checked_engine(3, "catchup", lambda num_draft_tokens: num_accepted, 4, 5, 1)
    engine.generate(requests_of(LENGTHS))
    assert set(rule.accepted) == {num_accepted} and len(rule.accepted) > 30


@pytest.mark.parametrize("prune", PRUNING)
def test_rows_and_lengths_of_a_round(prune: str) -> None:
    """Module i has N + i rows that end at L + n - 1 and see L + n keys; what goes on is what the knobs say.

    Of a prompt a later module takes the pairs, and then, for its draft, the last K of them and the drafts before it.
    """
    engine, _, modules = make_checked_engine(3, prune, lambda num_draft_tokens: 1, 4, 512, 1)
    engine.generate(requests_of([6]))
    prefill, catchup = PRUNING[prune]
    for index, module in enumerate(modules):
        prompt, rounds = module.calls[: min(index, 1) + 1], module.calls[min(index, 1) + 1 :]
        num_rows, is_live = ([6], [True]) if index == 0 else ([6, 3 + index], [False, True])
        assert [len(call.tokens) for call in prompt] == num_rows
        assert [call.num_kept for call in prompt] == (num_rows if prefill == "all_rows" else is_live)
        for number, call in enumerate(rounds, start=1):
            end = 6 + 2 * number
            assert call.attention.positions.tolist() == [max(0, p) for p in range(end - 4 - index, end)]
            assert call.attention.seq_lens.tolist() == [end]
            assert call.num_kept == (4 + index if catchup == "none" else 1)
            assert call.live is not None and call.live.seq_lens.tolist() == [end]
            num_queries = 1 if catchup == "pre_attention" else 4 + index
            assert call.live.num_queries == num_queries and call.live.positions[-1] == end - 1


def test_what_it_asks_for() -> None:
    engine, _, _ = make_checked_engine(2, "none", random_script(), 4, 512, 1)
    drafter = engine.parts.drafter
    assert drafter.num_draft_tokens == 2
    assert drafter.requirements.catches_up and drafter.requirements.distinct_steps
    assert drafter.requirements.features == POST_NORM
    assert drafter.kept_logits(torch.tensor([0])) is None
