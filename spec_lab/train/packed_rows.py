"""Rows of packed documents: those of a batch, and all rows of a training, from which steps draw batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spec_lab.train.data import step_generator


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of packed documents, [rows, length] each.

    Attributes:
        tokens: ids, in any integer type that holds the vocabulary.
        segments: the document of each token within its row; equal numbers are one document.
        positions: the place of each token in its document.
        is_supervised: True for tokens that the target wrote.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor
    is_supervised: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the four in their order."""
        return self.tokens, self.segments, self.positions, self.is_supervised

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> PackedRows:
        """Copy packed rows to a device."""
        parts = packed.tokens, packed.segments, packed.positions, packed.is_supervised
        return cls(*(part.to(device) for part in parts))

    def to(self, device: torch.device) -> PackedRows:
        return PackedRows(*(tensor.to(device) for tensor in self.tensors()))

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def rows(self, picked: Tensor | slice) -> PackedRows:
        return PackedRows(*(tensor[picked] for tensor in self.tensors()))

    def batch(self, step: int, batch_size: int, seed: int) -> PackedRows:
        """Return the rows of a step, which depend only on seed and step. Each epoch is a new order of all rows."""
        first = step * batch_size
        numbers = torch.arange(first, first + batch_size)
        picked = torch.empty_like(numbers)
        for epoch in range(first // self.num_rows, (first + batch_size - 1) // self.num_rows + 1):
            order = torch.randperm(self.num_rows, generator=step_generator(epoch, seed, torch.device("cpu")))
            inside = numbers // self.num_rows == epoch
            picked[inside] = order[numbers[inside] % self.num_rows]
        return self.rows(picked.to(self.tokens.device))


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """The places of a chain's rows: `positions` [batch, rows] within documents, and the documents `segments`
    [batch, rows].

    If each row of the batch is one document, `positions` is [1, rows] and `segments` is None.
    """

    positions: Tensor
    segments: Tensor | None

    @classmethod
    def of_one_document(cls, embeddings: Tensor) -> RowPlaces:
        """Place the rows of [batch, rows, hidden] at the positions 0, 1, ..."""
        return cls(torch.arange(embeddings.shape[1], device=embeddings.device)[None], None)


class Packed(Protocol):
    """The four tensors of `PackedRows`, as packed by `spec_lab.train.texts`."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def segments(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def is_supervised(self) -> Tensor: ...


class TrainingTexts(Protocol):
    """The texts on which a drafter is trained, as stored by `spec_lab.train.texts`."""

    def __len__(self) -> int: ...

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        """Return [vocab_size]: how often the target wrote each token."""
        ...

    def split(self, held_out: float) -> tuple[TrainingTexts, TrainingTexts]:
        """Return the texts to learn on, and the held-out share."""
        ...

    def packed(self, row_length: int, seed: int) -> Packed:
        """Pack texts into rows."""
        ...
