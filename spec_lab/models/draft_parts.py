"""The parts of draft heads in torch, and the protocols that their replacements keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.core.passes import Pass
from spec_lab.models.layer_stack import Layer
from spec_lab.models.linear import Linear
from spec_lab.models.norms import WeightedNorm
from spec_lab.models.rope import RotaryTable
from spec_lab.models.scored_tokens import top_probability


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Norms a token's embedding and a hidden state, and concatenates them."""

    embedding: torch.Tensor
    embedding_norm: WeightedNorm
    hidden_norm: WeightedNorm

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both concatenated [rows, 2 * hidden_size], and the normed hidden states alone."""
        normed = self.hidden_norm(hidden)
        embedded = self.embedding_norm(F.embedding(token_ids, self.embedding))
        return torch.cat((embedded, normed), dim=-1), normed


@dataclass(frozen=True, slots=True)
class LikeliestToken:
    """Finds the token with the largest logit of a head.

    Attributes:
        norm: the norm before the head; None if its inputs are already normed.
        token_map: [draft vocabulary] target ids; None if the head's ids are target ids.
    """

    norm: WeightedNorm | None
    head: Linear
    token_map: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] into [rows] token ids."""
        return self._mapped(self._logits(hidden).argmax(dim=-1))

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids [rows] for `hidden` [rows, hidden_size], and their probabilities [rows] among the head's
        tokens."""
        logits = self._logits(hidden)
        return self._mapped(logits.argmax(dim=-1)), top_probability(logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden if self.norm is None else self.norm(hidden))

    def _mapped(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.token_map is None else self.token_map[ids]


class Likeliest(Protocol):
    """Finds the likeliest tokens: a `LikeliestToken`, `TokenClusters`, or a kernel that replaces one."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] into [rows] token ids."""
        ...

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids [rows] for `hidden` [rows, hidden_size], and the probability [rows] of each among the
        scored tokens."""
        ...


class GreedyHead:
    """The part of a draft head that picks the likeliest tokens."""

    likeliest: Likeliest

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens [rows], in target ids; ties go to the lowest id."""
        return self.likeliest(hidden)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens [rows] and their probabilities [rows] among the scored tokens."""
        return self.likeliest.with_probability(hidden)


DraftInputs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A `DraftInput`, or a kernel that replaces it."""


class DraftLayers(Protocol):
    """The input and the layer of a draft head."""

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        """Run tokens [rows] and hidden states [rows, hidden_size], and return the live rows' output [live rows,
        hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """The input of a draft head, followed by its layer.

    Attributes:
        residual_is_normed: the layer's residual stream is the hidden state after its norm, not before.
    """

    inputs: DraftInputs
    layer: Layer
    rotary: RotaryTable
    residual_is_normed: bool

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        rows, normed = self.inputs(token_ids, hidden)
        stream = normed if self.residual_is_normed else hidden
        return at.kept.live(self.layer(stream, self.rotary.turning(at), rows))
