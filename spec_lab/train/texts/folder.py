"""A folder of texts: `header.json`, prompts as JSON Lines, and answers in `answers-00000.safetensors` and so on.

Each file is written under a temporary name, renamed, and then listed in the header. So a kill loses at most the current
file. In files, ids have the type of `smallest_id_type`; in memory they are int32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from spec_lab.core.errors import UserError
from spec_lab.train.data import smallest_id_type
from spec_lab.train.reading import reading
from spec_lab.train.texts.header import HEADER, WRITE_AGAIN, TextsHeader, refuse_without_header
from spec_lab.train.texts.packing import PackedTexts, pack
from spec_lab.train.texts.prompts import Conversation

MOST_FILE_BYTES = 15 * 10**6
ANSWERS, PROMPTS, FOLLOW_UPS = "answers", "prompts", "followups"


@dataclass(frozen=True, slots=True)
class Answered:
    """The ids of one text, the length of its prompt, and the number of its conversation."""

    tokens: list[int]
    prompt_length: int
    conversation: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts with the target's answers, concatenated.

    With a vocabulary of up to 65,536, a million texts of 300 tokens take 600 MB in files and 1.2 GB in memory.

    Attributes:
        tokens: [num_tokens] int32 ids.
        starts: [num_texts + 1] int64 where each text begins; the last entry is `num_tokens`.
        prompt_lengths: [num_texts] int32 number of leading tokens that are the prompt, also if the target wrote that.
        conversations: [num_texts] int32 the conversation of each text; its turns share a number.
    """

    tokens: Tensor
    starts: Tensor
    prompt_lengths: Tensor
    conversations: Tensor
    header: TextsHeader

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """The tokens of each text, [num_texts] int64."""
        return self.starts.diff()

    @property
    def num_written_tokens(self) -> int:
        """The number of tokens of the target's answers."""
        return int(self.lengths.sum() - self.prompt_lengths.sum())

    @classmethod
    def load(cls, folder: Path) -> Texts:
        """Read all finished files of a folder, or of its subfolders, which several writers may fill in parallel.

        Raises:
            UserError: there are none, one cannot be read, or two subfolders share prompts or differ in more than
                `MAY_DIFFER`.
        """
        inside = sorted(header.parent for header in folder.glob(f"*/{HEADER}"))
        if (folder / HEADER).exists() or not inside:
            return cls._of_one(folder)
        parts = [cls._of_one(one) for one in inside]
        for place, part in enumerate(parts):
            for before in parts[:place]:
                before.header.refuse_beside(part.header, inside[place])
        return cls._joined(parts)

    @classmethod
    def _of_one(cls, folder: Path) -> Texts:
        header = TextsHeader.read(folder)
        names = sorted(name for name in header.files if name.startswith(ANSWERS))
        if not names:
            raise UserError(f"{folder} has no answers yet; wait for the end of the command that writes it")
        parts = [_read(folder / name) for name in names]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        if int(joined["tokens"].max()) >= header.written_by.vocab_size:
            raise UserError(f"{folder} has token ids beyond its target's vocabulary; {WRITE_AGAIN}")
        return cls(
            torch.from_numpy(joined["tokens"].astype(np.int32)),
            _starts(torch.from_numpy(joined["lengths"])),
            torch.from_numpy(joined["prompt_lengths"]),
            torch.from_numpy(joined["conversations"]),
            header,
        )

    @classmethod
    def _joined(cls, parts: Sequence[Texts]) -> Texts:
        """Concatenate parts under the first one's header, with distinct conversation numbers."""
        counts = [int(part.conversations.max()) + 1 for part in parts]
        before = accumulate(counts, initial=0)
        return cls(
            torch.cat([part.tokens for part in parts]),
            _starts(torch.cat([part.lengths for part in parts])),
            torch.cat([part.prompt_lengths for part in parts]),
            torch.cat([part.conversations + first for part, first in zip(parts, before, strict=False)]),
            parts[0].header,
        )

    def text(self, index: int) -> Tensor:
        """Return the ids of one text, prompt and answer."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def take(self, indices: Tensor) -> Texts:
        """Return the texts at `indices` [n], in that order."""
        lengths = self.lengths[indices]
        starts = _starts(lengths)
        # The source index of each token: the start of its text, plus its offset in the text.
        places = torch.arange(int(starts[-1])) + (self.starts[indices] - starts[:-1]).repeat_interleave(lengths)
        return Texts(
            self.tokens[places], starts, self.prompt_lengths[indices], self.conversations[indices], self.header
        )

    def split(self, held_out: float, seed: int = 0) -> tuple[Texts, Texts]:
        """Return the texts to learn on, and the texts of a held-out share of conversations.

        With two conversations or more, each part gets at least one.
        """
        ids, places = self.conversations.unique(return_inverse=True)
        drawn = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed))
        is_held_out = (((drawn < held_out) | (drawn == drawn.min())) & (drawn != drawn.max()))[places]
        return self.take((~is_held_out).nonzero()[:, 0]), self.take(is_held_out.nonzero()[:, 0])

    def supervised(self) -> Tensor:
        """Return whether the target wrote each token, [num_tokens] bool."""
        place = torch.arange(len(self.tokens)) - self.starts[:-1].repeat_interleave(self.lengths)
        return place >= self.prompt_lengths.repeat_interleave(self.lengths)

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        """Return how often the target wrote each token, `[vocab_size]`."""
        return torch.bincount(self.tokens[self.supervised()].long(), minlength=vocab_size)

    def packed(self, row_length: int, seed: int) -> PackedTexts:
        """Pack the texts into rows of `row_length`, in an order that depends on `seed`."""
        return pack(self.tokens, self.starts, self.prompt_lengths, row_length, seed)


class TextsFolder:
    """Writes a folder of texts, or resumes one."""

    def __init__(self, root: Path, header: TextsHeader) -> None:
        """Make the folder, or open the existing one.

        Raises:
            UserError: it holds texts of another target or of other settings, or texts without a header.
        """
        self.root = root
        self.header = header
        refuse_without_header(root / HEADER, *(f"{kind}-*" for kind in (PROMPTS, FOLLOW_UPS, ANSWERS)))
        if (root / HEADER).is_file():
            self.header = TextsHeader.read(root)
            self.header.refuse_another(header, root)
            for name in [name for name in self.names(ANSWERS) if not (root / name).exists()]:
                del self.header.files[name]  # the file was deleted, so it is written again
        else:
            header.write(root)
        self.id_type = smallest_id_type(header.written_by.vocab_size)

    def names(self, kind: str) -> list[str]:
        """Return the finished files of a kind, in order."""
        return sorted(name for name in self.header.files if name.startswith(kind))

    def drop(self) -> None:
        """Delete everything that was written, after a refusal, so that other settings can be used next."""
        for name in (*self.header.files, HEADER):
            (self.root / name).unlink(missing_ok=True)

    def add_prompts(self, name: str, conversations: Iterable[Conversation], counts: Mapping[str, int]) -> None:
        """Write a file of prompts, which `prompts=[FILE]` can also read."""
        unfinished = self._unfinished(name)
        lines = (conversation.as_line() for conversation in conversations)
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._finish(unfinished, name, counts)

    def read_prompts(self, kind: str) -> list[Conversation]:
        """Return all prompts of a kind."""
        files = [self.root / name for name in self.names(kind)]
        found: list[Conversation] = []
        for file in files:
            with reading(file):
                found += map(Conversation.from_line, file.read_text(encoding="utf-8").split("\n")[:-1])
        return found

    def add_answers(self, name: str, texts: list[Answered], counts: Mapping[str, int]) -> None:
        """Write a file of answers."""
        tokens = np.fromiter((token for text in texts for token in text.tokens), dtype=self.id_type)
        columns = {
            "lengths": [len(text.tokens) for text in texts],
            "prompt_lengths": [text.prompt_length for text in texts],
            "conversations": [text.conversation for text in texts],
        }
        unfinished = self._unfinished(name)
        arrays = {key: np.array(values, dtype=np.int32) for key, values in columns.items()}
        save_file({"tokens": tokens, **arrays}, unfinished)
        self._finish(unfinished, name, counts)

    def read_answers(self, name: str) -> list[Answered]:
        """Return the texts of one file."""
        part = _read(self.root / name)
        ends = np.cumsum(part["lengths"], dtype=np.int64)
        rows = zip(ends - part["lengths"], ends, part["prompt_lengths"], part["conversations"], strict=True)
        tokens = part["tokens"]
        return [Answered(tokens[start:end].tolist(), int(prompt), int(of)) for start, end, prompt, of in rows]

    def _unfinished(self, name: str) -> Path:
        return self.root / f"{name}.unfinished"

    def _finish(self, unfinished: Path, name: str, counts: Mapping[str, int]) -> None:
        unfinished.replace(self.root / name)
        self.header.files[name] = {key: int(count) for key, count in counts.items()}
        self.header.write(self.root)


def _starts(lengths: Tensor) -> Tensor:
    """Return where texts of these lengths begin, and where the last one ends, int64."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _read(file: Path) -> dict[str, np.ndarray]:
    with reading(file, "delete it, and let the command that wrote the texts write it again"):
        part: dict[str, np.ndarray] = load_file(file)
        if set(part) != {"tokens", "lengths", "prompt_lengths", "conversations"}:
            raise ValueError("no texts")
        if len(part["tokens"]) != part["lengths"].sum():
            raise ValueError("lengths do not fit")
        if not ((part["prompt_lengths"] > 0) & (part["prompt_lengths"] <= part["lengths"])).all():
            raise ValueError("prompts do not fit")
    return part
