"""The texts that a head is trained on: prompts and outputs of finished runs, checked, split and packed.

`read_run` is the only place that knows how a run is recorded.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.errors import UserError
from spec_lab.record import reading as record
from spec_lab.train.packed import PackedRows

OF_TESTS = ("spec_bench",)
"""Workloads whose prompts are for testing: no head may learn them."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with the target's answer.

    Attributes:
        ids: both, concatenated.
        conversation: the first prompt of its conversation. Texts that share it are never split.
    """

    ids: np.ndarray[Any, np.dtype[np.int32]]
    prompt_length: int
    category: str
    conversation: bytes


@dataclass(frozen=True, slots=True)
class TextsOrigin:
    """What the texts of a run depend on.

    Attributes:
        target: digest of the weights.
        template: digest of the chat template.
        thinking: the switch of the template, as the run set it.
    """

    target: str | None
    template: str | None
    thinking: bool | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A finished run as the trainer reads it."""

    folder: Path
    origin: TextsOrigin
    workload: str
    sampling: dict[str, Any]
    texts: list[Text]


def read_run(folder: Path) -> Recorded:
    """Read the record and the requests of a run.

    Raises:
        UserError: the run is not finished.
    """
    run = record.read_run(folder)
    if run.status != "finished":
        raise UserError(f"data={folder}: this run is {run.status}; run it again, or leave it out")
    origin = TextsOrigin(run.target.digest, run.target.template, run.thinking)
    texts: list[Text] = []
    first: dict[str, bytes] = {}
    for row in record.read_requests(folder):
        begun = row.id.rpartition("-turn")[0] or row.id  # later turns are named `ID-turn2`, ...
        own = first.setdefault(begun, np.array(row.prompt_ids, dtype=np.int32).tobytes())
        ids = np.array([*row.prompt_ids, *row.output_ids], dtype=np.int32)
        texts.append(Text(ids, len(row.prompt_ids), row.category, own))
    return Recorded(folder, origin, run.config["workload"]["name"], run.sampling, texts=texts)


def read_runs(pattern: str, target: TextsOrigin, are_learnt: bool = True) -> list[Recorded]:
    """Read all runs whose folders match `pattern`.

    Raises:
        UserError: there are none, they are another target's, or `are_learnt` and their prompts are for testing.
    """
    knob = "data" if are_learnt else "held_out"
    found = glob.glob(f"{pattern}/summary.json")  # noqa: PTH207 - a pattern may be absolute
    folders = sorted(Path(file).parent for file in found)
    if not folders:
        raise UserError(f"{knob}={pattern} matches no folder of a run; give those of runs with drafter=none")
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        its, wanted = run.origin, TextsOrigin(target.target, target.template, runs[0].origin.thinking)
        for name in ("target", "template", "thinking"):
            if getattr(its, name) != getattr(wanted, name):
                raise UserError(
                    f"{knob}={run.folder}: {name} is {getattr(its, name)}, not {getattr(wanted, name)}; a head learns "
                    "from one target, template and thinking switch"
                )
        if are_learnt and run.workload in OF_TESTS:
            raise UserError(f"data={run.folder}: workload={run.workload} is for testing; use it as held_out")
    return runs


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one target."""

    texts: Sequence[Text]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    @property
    def num_written(self) -> int:
        """The number of tokens that the target wrote."""
        return sum(len(text.ids) - text.prompt_length for text in self.texts)

    def counts(self, vocab_size: int) -> Tensor:
        """Return how often the target wrote each token, [vocab_size]."""
        written = [text.ids[text.prompt_length :] for text in self.texts]
        return torch.from_numpy(np.bincount(np.concatenate(written), minlength=vocab_size))

    def in_turn(self, most: int) -> list[Text]:
        """Return the first `most` texts of different prompts, taken from the categories in turn."""
        seen: set[bytes] = set()
        by_category: dict[str, list[Text]] = {}
        for text in self.texts:
            prompt = text.ids[: text.prompt_length].tobytes()
            if prompt not in seen:
                seen.add(prompt)
                by_category.setdefault(text.category, []).append(text)
        places = range(max(map(len, by_category.values()), default=0))
        found = [texts[place] for place in places for _, texts in sorted(by_category.items()) if place < len(texts)]
        return found[:most]

    def packed(self, row_length: int, seed: int) -> PackedRows:
        """Pack whole texts into rows, in an order that depends on `seed`: each into the fullest row with room for it.

        A text longer than a row loses its end. A text whose prompt fills a row is left out.

        Raises:
            UserError: no token that the target wrote is left.
        """
        kept = [text for text in self.texts if text.prompt_length < min(row_length, len(text.ids))]
        if not kept:
            raise UserError(f"row_length={row_length} has room for prompts alone; raise it, or take other texts")
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed)).tolist()
        kept = [kept[place] for place in order]
        placed = place_texts([min(len(text.ids), row_length) for text in kept], row_length)
        shape = 1 + max(row for row, _, _ in placed), row_length
        tokens, segments, positions = (np.zeros(shape, dtype=np.int32) for _ in range(3))
        supervised = np.zeros(shape, dtype=bool)
        for text, (row, column, number) in zip(kept, placed, strict=True):
            ids = text.ids[:row_length]
            at = row, slice(column, column + len(ids))
            tokens[at], segments[at], positions[at] = ids, number, np.arange(len(ids))
            supervised[at] = positions[at] >= text.prompt_length
        return PackedRows(*(torch.from_numpy(each) for each in (tokens, segments, positions, supervised)))


def place_texts(lengths: Iterable[int], row_length: int) -> list[tuple[int, int, int]]:
    """Return, for each text, its row, its first column, and its number in the row, from 1.

    Best-fit packing (Ding et al., 2024, "Fewer Truncations Improve Language Modeling").
    """
    placed: list[tuple[int, int, int]] = []
    filled: list[tuple[int, int]] = []  # of each row: its tokens and its texts
    rows_with: list[list[int]] = [[] for _ in range(row_length + 1)]
    num_with = np.zeros(row_length + 1, dtype=np.int32)
    for length in lengths:
        fitting = np.flatnonzero(num_with[length:])
        room = length + int(fitting[0]) if len(fitting) else row_length
        if len(fitting):
            row = rows_with[room].pop()
            num_with[room] -= 1
        else:
            row = len(filled)
            filled.append((0, 0))
        column, number = filled[row]
        placed.append((row, column, number + 1))
        filled[row] = column + length, number + 1
        rows_with[room - length].append(row)
        num_with[room - length] += 1
    return placed


def split(texts: Sequence[Text], share: float, seed: int = 0) -> tuple[Texts, Texts]:
    """Return the texts to learn from, and those of a held-out share of conversations, at least one of each.

    Raises:
        UserError: there is only one conversation.
    """
    names = sorted({text.conversation for text in texts})
    if len(names) < 2:
        raise UserError(f"data: {len(names)} conversations, but another one must be held out; take more texts")
    drawn = torch.rand(len(names), generator=torch.Generator().manual_seed(seed))
    chosen = ((drawn < share) | (drawn == drawn.min())) & (drawn != drawn.max())
    held_out = {name for name, is_chosen in zip(names, chosen.tolist(), strict=True) if is_chosen}
    learnt = [text for text in texts if text.conversation not in held_out]
    return Texts(learnt), Texts([text for text in texts if text.conversation in held_out])


def learnt_and_held_out(
    data: Sequence[Recorded], held_out: Sequence[Recorded] | None, share: float
) -> tuple[Texts, Texts]:
    """Return the texts to learn from, and those to measure on: of `held_out`, or else a share of the data.

    Raises:
        UserError: both have a prompt in common, or there are too few texts.
    """
    texts = [text for run in data for text in run.texts]
    if held_out is None:
        return split(texts, share)
    learnt = {text.conversation for text in texts}
    for run in held_out:
        if both := sum(text.conversation in learnt for text in run.texts):
            raise UserError(f"held_out={run.folder}: {both} of its prompts are in data too; take other runs")
    return Texts(texts), Texts([text for run in held_out for text in run.texts])
