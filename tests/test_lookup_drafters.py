"""Drafters that look tokens up: n-gram against a slow search, oracle, random."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.prompts import PromptPack
from spec_lab.core.ragged import whole_prompt
from spec_lab.core.types import Request, RoundBatch, Verification, VerifiedRound
from spec_lab.drafters.history import LookupState, NewTokens, TokenHistory, read_tokens, write_tokens
from spec_lab.drafters.ngram import NgramDrafter
from spec_lab.drafters.oracle import OracleDrafter
from spec_lab.drafters.random import RandomDrafter
from spec_lab.engine.drafts import collect_drafts

CPU = torch.device("cpu")
BACKEND = TorchAttention(4, 64)
JUNK = 999


def slow_drafts(known: list[int], num_draft_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Search in plain Python for the latest earlier occurrence of the longest suffix, and continue it; 0 where nothing
    is known.
    """
    for size in range(max_ngram, min_ngram - 1, -1):
        suffix = known[-size:]
        for start in range(len(known) - size - 1, -1, -1):
            if len(suffix) == size and known[start : start + size] == suffix:
                found = known[start + size :][:num_draft_tokens]
                return found + [0] * (num_draft_tokens - len(found))
    return [0] * num_draft_tokens


def verified_round(
    tokens: list[list[int]],
    num_emitted: list[int],
    kv_lens: list[int],
    num_draft_tokens: int,
    slot_ids: list[int] | None = None,
) -> VerifiedRound:
    batch_size, num_rows = len(num_emitted), num_draft_tokens + 1
    counts = torch.tensor(num_emitted)
    padded = [row + [JUNK] * (num_rows - len(row)) for row in tokens]
    batch = RoundBatch(
        slot_ids=torch.tensor(slot_ids or list(range(batch_size))),
        active=counts > 0,
        kv_lens=torch.tensor(kv_lens),
        input_ids=torch.zeros(batch_size, num_rows, dtype=torch.int64),
        page_table=torch.ones(batch_size, 2, dtype=torch.int64),
        max_kv_len=max(kv_lens),
    )
    return VerifiedRound(batch, Verification(torch.tensor(padded), counts), None)


def last_chunk(slot: int, prompt: list[int], start: int, sampled: int) -> PromptPack:
    pages = torch.ones(1, 2, dtype=torch.int64)
    return whole_prompt(BACKEND, pages, torch.tensor([*prompt[start:], sampled]), None, 3, slot, start)


small_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=20)


@given(
    prompts=st.lists(small_tokens, min_size=1, max_size=3),
    blocks=st.lists(st.lists(small_tokens, min_size=3, max_size=3), max_size=4),
    num_draft_tokens=st.integers(1, 4),
    sizes=st.sampled_from([(4, 1), (4, 2), (3, 3), (1, 1)]),
    chunk=st.sampled_from([1, 3, 64]),
)
def test_ngram_equals_the_slow_search(
    prompts: list[list[int]],
    blocks: list[list[list[int]]],
    num_draft_tokens: int,
    sizes: tuple[int, int],
    chunk: int,
) -> None:
    """Prompt passes come in chunks, then rounds of other lengths; a padded row stands beside, and junk past the known
    tokens.
    """
    num_rows, num_slots = num_draft_tokens + 1, len(prompts)
    history = TokenHistory(num_slots, 64, CPU)
    drafter = NgramDrafter(num_draft_tokens, *sizes, history)
    texts = []
    for slot, prompt in enumerate(prompts):
        drafter.admit(slot, Request("r", "x", tuple(prompt), 9))
        history.tokens[slot, len(prompt) :] = 2
        for start in range(0, len(prompt), chunk):
            if start + chunk < len(prompt):
                middle = last_chunk(slot, prompt[: start + chunk], start, prompt[start + chunk])
                middle.ends = None
                assert drafter.ingest(middle) is None
        state = drafter.ingest(last_chunk(slot, prompt, (len(prompt) - 1) // chunk * chunk, sampled=3))
        assert state is not None
        texts.append([*prompt, 3])
        assert collect_drafts(drafter, BACKEND, state).tolist() == [slow_drafts(texts[-1], num_draft_tokens, *sizes)]
    for block in blocks:
        emitted = [tokens[:num_rows] for tokens in block[:num_slots]] + [[]]
        verified = verified_round(
            emitted,
            [len(tokens) for tokens in emitted],
            [len(text) - 1 for text in texts] + [0],
            num_draft_tokens,
            [*range(num_slots), num_slots],
        )
        for text, tokens in zip(texts, emitted[:-1], strict=True):
            text.extend(tokens)
        drafts = collect_drafts(drafter, BACKEND, drafter.catch_up(verified)).tolist()[:-1]
        assert drafts == [slow_drafts(text, num_draft_tokens, *sizes) for text in texts]


def test_ngram_does_not_find_what_an_earlier_request_left_in_the_slot() -> None:
    """A slot's history is cleared at admission."""
    history = TokenHistory(1, 32, CPU)
    drafter = NgramDrafter(2, 2, 1, history)
    for prompt, expected in (([5, 6, 7, 8, 5, 6], [7, 8]), ([9, 8, 7], [0, 0])):
        drafter.admit(0, Request("r", "x", tuple(prompt[:-1]), 9))
        state = drafter.ingest(last_chunk(0, prompt[:-1], 0, prompt[-1]))
        assert state is not None
        assert collect_drafts(drafter, BACKEND, state).tolist() == [expected]


def append(history: TokenHistory, verified: VerifiedRound) -> None:
    new = NewTokens.of_round(verified)
    write_tokens(history.tokens, new.slot_ids, new.starts, new.tokens, new.counts)


def test_history_takes_the_emitted_tokens_at_l_plus_1_to_l_plus_n_and_no_rejected_one() -> None:
    history = TokenHistory(3, 12, CPU)
    for slot in range(3):
        history.reset(slot, [slot + 1] * 4)
    append(history, verified_round([[11, 12, 13], [14], []], [3, 1, 0], [3, 5, 0], 2, [1, 0, 3]))
    assert history.tokens[1].tolist() == [2, 2, 2, 2, 11, 12, 13, 0, 0, 0, 0, 0]
    assert history.tokens[0].tolist() == [1, 1, 1, 1, 0, 0, 14, 0, 0, 0, 0, 0]
    assert history.tokens[2].tolist() == [3] * 4 + [0] * 8
    assert not history.tokens[3].any(), "a padded row emitted nothing"


def test_history_past_its_end_overwrites_no_token() -> None:
    history = TokenHistory(1, 8, CPU)
    history.reset(0, [1, 2, 3, 4, 5, 6, 7])
    append(history, verified_round([[11, 12, 13]], [3], [5], 2))
    assert history.tokens[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 11]
    assert read_tokens(history.tokens[:1], torch.tensor([6]), 4).tolist() == [[11, 0, 0, 0]]


def make_oracle(num_draft_tokens: int = 3) -> OracleDrafter:
    oracle = OracleDrafter(num_draft_tokens, TokenHistory(2, 16, CPU))
    oracle.learn({"a": [21, 22, 23, 24, 25], "b": [31]})
    oracle.admit(0, Request("a", "x", (11, 12), 5))
    oracle.admit(1, Request("b", "x", (13,), 1))
    return oracle


def test_oracle_replays_the_continuation_after_the_pending_token() -> None:
    oracle = make_oracle()
    middle = last_chunk(0, [11, 12], 0, 21)
    middle.ends = None
    assert oracle.ingest(middle) is None
    state = oracle.ingest(last_chunk(0, [11, 12], 0, 21))
    assert isinstance(state, LookupState)
    assert collect_drafts(oracle, BACKEND, state).tolist() == [[22, 23, 24]]
    verified = verified_round([[22, 23], [31]], [2, 1], [2, 0], 3)
    assert collect_drafts(oracle, BACKEND, oracle.catch_up(verified)).tolist() == [[24, 25, 0], [0, 0, 0]]


def test_random_drafts_are_seeded_uniform_and_of_the_whole_vocabulary() -> None:
    def drafts(seed: int) -> torch.Tensor:
        drafter = RandomDrafter(4, 7, SlotSeeds(500, seed, CPU))
        for slot in range(500):
            drafter.admit(slot, Request(f"r{slot}", "x", (1,), 5))
        verified = verified_round([[1]] * 500, [1] * 500, [0] * 500, 4)
        return collect_drafts(drafter, BACKEND, drafter.catch_up(verified))

    first = drafts(0)
    assert torch.equal(first, drafts(0)) and not torch.equal(first, drafts(1))
    counts = torch.bincount(first.flatten(), minlength=7)
    assert len(counts) == 7 and counts.min() > 200
    assert not torch.equal(first[:, 0], first[:, 1])
