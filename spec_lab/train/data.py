"""From text to token rows: `num_workers` processes generate, tokenise and pack the corpus."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.corpus.example import END_OF_TEXT, Example, render_example
from spec_lab.train.reading import reading

IGNORED_LABEL = -100

Job = TypeVar("Job")
Result = TypeVar("Result")


def smallest_id_type(vocab_size: int, in_torch: bool = False) -> type[np.integer[Any]]:
    """Return the type for a vocabulary's ids: uint16 if it holds them, else int32.

    With `in_torch`, int16 takes the place of uint16, which torch supports poorly.
    """
    types: tuple[type[np.integer[Any]], ...] = (np.int16 if in_torch else np.uint16, np.int32)
    return next(each for each in types if vocab_size <= np.iinfo(each).max + 1)


def pack_documents(documents: list[np.ndarray], row_length: int, pad_id: int) -> np.ndarray:
    """Pack documents into rows `[num_rows, row_length]` of their type, each into the fullest row it fits.

    No document is split, since an answer without its question would teach guessing (best-fit packing: Ding et al.,
    2024, "Fewer Truncations Improve Language Modeling"). A document longer than a row loses its end.
    """
    rows: list[list[np.ndarray]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    for document in documents:
        document = document[:row_length]
        room = next((room for room in range(len(document), row_length) if rows_with_room[room]), row_length)
        if room < row_length:
            row = rows_with_room[room].pop()
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        rows_with_room[room - len(document)].append(row)
    packed = np.full((len(rows), row_length), pad_id, dtype=documents[0].dtype)
    for index, parts in enumerate(rows):
        joined = np.concatenate(parts)
        packed[index, : len(joined)] = joined
    return packed


def next_token_labels(rows: Tensor, pad_id: int) -> Tensor:
    """Return labels `[batch, length - 1]` for tokens `[batch, length]`; padding after padding is ignored."""
    labels = rows[:, 1:].clone()
    labels[(rows[:, 1:] == pad_id) & (rows[:, :-1] == pad_id)] = IGNORED_LABEL
    return labels


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of `next_token_labels` under logits `[batch, length, vocab]`."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL)


@dataclass(frozen=True, slots=True)
class Shard:
    """The share that one process generates: examples of each of its categories, from its own seed."""

    tokenizer_file: str
    categories: tuple[str, ...]
    seed: int
    num_examples_per_category: int
    row_length: int


def generate_examples(category: str, seed: int, num_examples: int) -> list[Example]:
    """Return examples of the training split, which depend on the seed."""
    from spec_lab.corpus.categories import generate

    return list(islice(generate(category, "train", seed), num_examples))


def build_shard(shard: Shard) -> np.ndarray:
    """Return the packed rows of one shard, in which categories are mixed."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(shard.tokenizer_file)
    examples: list[Example] = []
    for category in shard.categories:
        examples += generate_examples(category, shard.seed, shard.num_examples_per_category)
    random.Random(shard.seed).shuffle(examples)
    encodings = tokenizer.encode_batch([render_example(example) for example in examples])
    id_type = smallest_id_type(tokenizer.get_vocab_size())
    documents = [np.array(encoding.ids, dtype=id_type) for encoding in encodings]
    end_of_text_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text_id is not None
    return pack_documents(documents, shard.row_length, end_of_text_id)


def map_in_processes(function: Callable[[Job], Result], jobs: list[Job], num_workers: int) -> Iterator[Result]:
    """Do `map(function, jobs)` in order, with several workers in spawned processes.

    Forked processes would inherit CUDA and tokenizer threads.
    """
    if num_workers == 1:
        yield from map(function, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_tokenise_on_one_thread) as pool:
        with _interrupts_held_back():
            results = pool.map(function, jobs)
        yield from results


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, and hide it from processes that are started inside.

    A terminal sends Ctrl-C to these processes too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tokenise_on_one_thread() -> None:
    """Make the tokenizer use one thread, since there are already several processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def tokenise_natural_text(tokenizer_file: str, documents: list[str]) -> np.ndarray:
    """Return one stream of ids, in which `<|endoftext|>` precedes every document."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    encodings = tokenizer.encode_batch([END_OF_TEXT + document for document in documents])
    id_type = smallest_id_type(tokenizer.get_vocab_size())
    return np.concatenate([np.array(encoding.ids, dtype=id_type) for encoding in encodings])


def step_generator(step: int, seed: int, device: torch.device) -> torch.Generator:
    """Make the generator of one training step. It is on the device, since copying indices there would make the host
    wait."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step)


def _load_tokens(file: Path) -> Tensor:
    with reading(file):
        tokens = np.load(file, allow_pickle=False)
        return torch.from_numpy(tokens.astype(smallest_id_type(int(tokens.max()) + 1, in_torch=True)))


@dataclass(frozen=True, slots=True)
class TrainingTokens:
    """The token files of one run, on the training device.

    `rows` are packed examples `[num_rows, row_length]`. `natural` is one long stream, read at random offsets, so that
    the model sees its tokens in different windows.
    """

    rows: Tensor
    natural: Tensor
    natural_fraction: float
    end_of_text_id: int

    @classmethod
    def load(cls, folder: Path, natural_fraction: float, end_of_text_id: int, device: torch.device) -> TrainingTokens:
        """Load `rows.npy` and `natural.npy`."""
        rows, natural = (_load_tokens(folder / name).to(device) for name in ("rows.npy", "natural.npy"))
        return cls(rows, natural, natural_fraction, end_of_text_id)

    def to(self, device: torch.device) -> TrainingTokens:
        return replace(self, rows=self.rows.to(device), natural=self.natural.to(device))

    def batch(self, step: int, batch_size: int, seed: int) -> Tensor:
        """Return token rows `[batch_size, row_length]` (int64), drawn by seed and step."""
        device = self.rows.device
        generator = step_generator(step, seed, device)
        row_length = self.rows.shape[1]
        num_natural = round(batch_size * self.natural_fraction)
        picked = torch.randint(len(self.rows), (batch_size - num_natural,), generator=generator, device=device)
        last_start = len(self.natural) - row_length
        starts = torch.randint(last_start, (num_natural, 1), generator=generator, device=device)
        windows = self.natural[starts + torch.arange(row_length, device=device)]
        # Prompts that are to be continued begin with this token too, so each window must look like the start of a text.
        windows[:, 0] = self.end_of_text_id
        return torch.cat([self.rows[picked], windows]).long()

    def labelled_batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the rows of `batch` with their `next_token_labels`."""
        rows = self.batch(step, batch_size, seed)
        return rows, next_token_labels(rows, self.end_of_text_id)
