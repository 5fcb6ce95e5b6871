"""Helpers that count how many rows reach each part of a decoder layer, call by call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from spec_lab.models.layers import DecoderLayer


@dataclass
class LayerRows:
    """How many rows of each call attend, how many meet o_proj, and how many meet the MLP."""

    attended: list[int] = field(default_factory=list)
    projected: list[int] = field(default_factory=list)
    mlp: list[int] = field(default_factory=list)


@dataclass
class CountingBackend:
    """The attention of a backend, which notes how many rows attend."""

    backend: Any
    attended: list[int]

    def attend(self, queries: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.attended.append(len(queries))
        return self.backend.attend(queries, *rest)


def count_rows(layer: DecoderLayer) -> LayerRows:
    """Count the rows of `layer` from now on."""
    rows, attention, close, finish = LayerRows(), *cast(Any, (layer.mixer, layer.close, layer.finish))
    attention.backend = CountingBackend(attention.backend, rows.attended)
    close.product = _counting(close.product, rows.projected)
    finish.part = _counting(finish.part, rows.mlp)
    return rows


def _counting(function: Callable[[torch.Tensor], torch.Tensor], counts: list[int]) -> Any:
    def counted(rows: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return function(rows)

    return counted
