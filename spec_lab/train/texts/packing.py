"""Packs texts into rows of equal length, with several separate texts in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Rows of packed texts.

    Attributes:
        tokens: [num_rows, row_length] int32 ids; 0 for padding.
        segments: [num_rows, row_length] int32 the number of a token's text in its row, from 1; 0 for padding.
        positions: [num_rows, row_length] int32 a token's position in its text.
        is_supervised: [num_rows, row_length] bool, whether the target wrote the token.
        num_cut: texts that are longer than a row. They lost their end, or were left out if their prompt fills a row.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor
    is_supervised: Tensor
    num_cut: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fill(self) -> float:
        """The share of places that are not padding."""
        return float((self.segments > 0).float().mean())


def pack(tokens: Tensor, starts: Tensor, prompt_lengths: Tensor, row_length: int, seed: int) -> PackedTexts:
    """Pack texts into rows, in an order that depends on `seed`.

    Each text goes into the fullest open row that has room for it. A text longer than a row loses its end. A text whose
    prompt fills a whole row is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = starts.diff().clamp(max=row_length)
    order = torch.randperm(len(lengths), generator=generator)
    order = order[prompt_lengths[order] < row_length]
    rows, columns, segments = place_texts(lengths[order].tolist(), row_length)
    num_rows = max(rows, default=-1) + 1
    lengths = lengths[order]
    # For each placed token: its text, and its position in the text.
    text = torch.arange(len(order)).repeat_interleave(lengths)
    place = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths)[text]
    at = (torch.tensor(rows) * row_length + torch.tensor(columns))[text] + place

    def laid_out(values: Tensor, dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(num_rows * row_length, dtype=dtype)
        flat[at] = values.to(dtype)
        return flat.view(num_rows, row_length)

    return PackedTexts(
        tokens=laid_out(tokens[starts[order][text] + place], torch.int32),
        segments=laid_out(torch.tensor(segments)[text], torch.int32),
        positions=laid_out(place, torch.int32),
        is_supervised=laid_out(place >= prompt_lengths[order][text], torch.bool),
        num_cut=int((starts.diff() > row_length).sum()),
    )


def place_texts(lengths: list[int], row_length: int) -> tuple[list[int], list[int], list[int]]:
    """Return, for each text, its row, its first column, and its number in the row, from 1."""
    rows: list[int] = []
    columns: list[int] = []
    numbers: list[int] = []
    rooms: dict[int, list[int]] = {}
    filled: list[int] = []
    held: list[int] = []
    open_rooms = np.zeros(row_length + 1, dtype=np.int32)
    for length in lengths:
        fitting = np.flatnonzero(open_rooms[length:])
        if len(fitting):
            room = length + int(fitting[0])
            row = rooms[room].pop()
            open_rooms[room] -= 1
        else:
            room, row = row_length, len(filled)
            filled.append(0)
            held.append(0)
        rows.append(row)
        columns.append(filled[row])
        filled[row] += length
        held[row] += 1
        numbers.append(held[row])
        rooms.setdefault(room - length, []).append(row)
        open_rooms[room - length] += 1
    return rows, columns, numbers
