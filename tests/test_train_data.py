"""The tokenizer, the packing of documents, and the counting of rounds."""

from __future__ import annotations

import signal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from spec_lab.corpus.categories import generate
from spec_lab.corpus.example import SPECIAL_TOKENS, render_example, render_prompt
from spec_lab.train.data import (
    IGNORED_LABEL,
    TrainingTokens,
    map_in_processes,
    next_token_labels,
    pack_documents,
    smallest_id_type,
)
from spec_lab.train.generate import Continuation
from spec_lab.train.generations import Generations
from spec_lab.train.rounds import RoundCounts
from spec_lab.train.tokenizer import train_tokenizer

VOCAB_SIZE = 600


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    examples = list(islice(generate("lists", "train", 0), 60))
    return train_tokenizer([render_example(example) for example in examples], VOCAB_SIZE)


def test_tokenizer_gives_any_text_back(tokenizer: PreTrainedTokenizerFast) -> None:
    example = next(iter(generate("lists", "train", 1)))
    for text in (render_example(example), "tab\tnew\n\n  ünïcode 測試 🙂", "<|user|>\nx<|end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == VOCAB_SIZE


def test_markers_are_one_token_each_and_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    for marker in SPECIAL_TOKENS:
        assert len(tokenizer(marker)["input_ids"]) == 1
    assert tokenizer.tokenize("2026")[-4:] == ["2", "0", "2", "6"]
    multi_digit = [token for token in tokenizer.get_vocab() if sum(c.isdigit() for c in token) > 0 and len(token) > 1]
    assert multi_digit == []


def test_chat_template_writes_the_prompt_of_the_workloads(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render_prompt("chat", "How many?")


def test_thinking_markers_survive_decoding_without_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("<|assistant|><think>a</think><|end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_ids_of_a_large_vocabulary_are_kept_as_they_are(tmp_path: Path) -> None:
    """Smaller integers would wrap around, and say nothing."""
    for largest in (2**15 - 1, 2**15, 2**16 - 1, 2**16, 200_000):
        texts = Generations.of([Continuation([3, largest], [largest - 1], True)], 4, pad_id=0, vocab_size=largest + 1)
        assert texts.tokens.tolist() == [[3, largest, largest - 1, 0]]
        assert texts.tokens.element_size() == (2 if largest < 2**15 else 4)
        rows = np.array([[1, largest]], dtype=smallest_id_type(largest + 1))
        assert rows.itemsize == (2 if largest < 2**16 else 4)
        for name in ("rows.npy", "natural.npy"):
            np.save(tmp_path / name, pack_documents([rows[0]], row_length=3, pad_id=0))
        assert TrainingTokens.load(tmp_path, 0.5, 0, torch.device("cpu")).rows.tolist() == [[1, largest, 0]]


def test_packing_splits_nothing_and_loses_nothing() -> None:
    random = np.random.default_rng(0)
    documents = [np.full(random.integers(2, 9), value, dtype=np.uint16) for value in range(1, 41)]
    rows = pack_documents(documents, row_length=12, pad_id=0)
    for value, document in enumerate(documents, start=1):
        row, columns = np.nonzero(rows == value)
        assert len(set(row)) == 1 and len(columns) == len(document)
        assert columns.tolist() == list(range(columns[0], columns[0] + len(document)))
    assert len(rows) < 1.2 * sum(map(len, documents)) / 12


def test_a_document_longer_than_a_row_is_cut_to_it() -> None:
    rows = pack_documents([np.arange(1, 9, dtype=np.uint16), np.array([9], dtype=np.uint16)], row_length=5, pad_id=0)
    assert rows.tolist() == [[1, 2, 3, 4, 5], [9, 0, 0, 0, 0]]


def test_padding_is_learnt_once_and_then_ignored() -> None:
    labels = next_token_labels(torch.tensor([[5, 6, 0, 0, 0], [0, 7, 8, 9, 5]]), pad_id=0)
    assert labels.tolist() == [[6, 0, IGNORED_LABEL, IGNORED_LABEL], [7, 8, 9, 5]]


def test_batches_depend_on_the_step_alone_and_mix_as_told() -> None:
    rows = torch.full((10, 6), 3, dtype=torch.int16)
    tokens = TrainingTokens(rows, torch.arange(100, 200, dtype=torch.int16), 0.25, end_of_text_id=1)
    batch = tokens.batch(step=5, batch_size=8, seed=0)
    assert torch.equal(batch, tokens.batch(5, 8, 0)) and not torch.equal(batch, tokens.batch(6, 8, 0))
    assert (batch[:6] == 3).all() and (batch[6:, 0] == 1).all()
    assert (batch[6:, 1:].diff() == 1).all() and (batch[6:, 1:] > 100).all()


def test_rounds_of_a_text_counted_by_hand() -> None:
    # Prompt tokens 0..2, written 3..9. Token 3 comes from the prefill; the first drafts start from position 2.
    num_matches = [0] * 10
    num_matches[2] = 1  # emits 4 5, so 5 tokens are committed
    num_matches[4] = 0  # emits 6
    num_matches[5] = 2  # emits 7 8 9: the text ends with this round, nothing is cut
    counts = RoundCounts(num_draft_tokens=3)
    counts.walk(num_matches, prompt_length=3, length=10)
    assert (counts.num_rounds, counts.num_cut_rounds) == (3, 0)
    assert counts.acceptance_length == 2.0
    assert counts.acceptance_rates == [2 / 3, 1 / 3, 0.0]


def test_a_round_that_runs_into_the_end_of_the_text_counts_up_to_there() -> None:
    num_matches = [0, 0, 3, 0, 0, 0, 1, 0, 0]
    counts = RoundCounts(num_draft_tokens=3)
    # The first round emits 4 5 6 7. Of the second only token 8 exists: it agrees, and no bonus follows.
    counts.walk(num_matches, prompt_length=3, length=9)
    assert (counts.num_rounds, counts.num_cut_rounds) == (2, 1)
    assert (counts.drafts.reached, counts.drafts.accepted) == ([2, 1, 1], [2, 1, 1])
    assert counts.acceptance_rates == [1.0, 1.0, 1.0]


def test_what_agrees_behind_the_end_of_a_text_changes_nothing() -> None:
    """Rows behind a text are padded, and a draft may agree with the padding."""
    found = []
    for beyond in (1, 2, 3):
        counts = RoundCounts(num_draft_tokens=3)
        counts.walk([0, 0, 0, 1, 0, beyond], prompt_length=3, length=8)
        found.append((counts.drafts, counts.num_cut_rounds))
    assert found[1:] == found[:-1]


def test_a_ctrl_c_reaches_the_first_process_alone() -> None:
    """A worker that died of it while it started would break the pool, and print pages."""
    blocked: Any = partial(signal.pthread_sigmask, signal.SIG_BLOCK)  # of a module that takes no time to import
    before, nothing = blocked(()), [(), (), ()]
    assert signal.SIGINT not in before
    for found in map_in_processes(blocked, nothing, num_workers=2):
        assert signal.SIGINT in found
        assert blocked(()) == before
