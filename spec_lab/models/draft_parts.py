"""The parts of draft heads: each as it is plainly, with the protocol of what may take its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.pruning_protocols import Drop
from spec_lab.core.types import AttentionMetadata, StartedDraft, VerifiedRound
from spec_lab.models.layer_stack import Layer
from spec_lab.models.layers import LayerParts
from spec_lab.models.linear import Linear
from spec_lab.models.norms import WeightedNorm
from spec_lab.models.rope import RotaryTable
from spec_lab.models.scored_tokens import top_probability


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Norms a token's embedding and a hidden state, and puts them side by side."""

    embedding: torch.Tensor
    embedding_norm: WeightedNorm
    hidden_norm: WeightedNorm

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows, 2 * hidden_size], and the normed hidden states alone."""
        normed = self.hidden_norm(hidden)
        embedded = self.embedding_norm(F.embedding(token_ids, self.embedding))
        return torch.cat((embedded, normed), dim=-1), normed


@dataclass(frozen=True, slots=True)
class LikeliestToken:
    """Finds the token that a head thinks likeliest.

    Attributes:
        norm: in front of the head; None where the rows have been normed.
        token_map: [draft vocabulary] ids of the target; None where they are the head's.
    """

    norm: WeightedNorm | None
    head: Linear
    token_map: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] into [rows] token ids."""
        return self._mapped(self._logits(hidden).argmax(dim=-1))

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn [rows, hidden_size] into [rows] token ids and their probabilities, which the ids of the head share."""
        logits = self._logits(hidden)
        return self._mapped(logits.argmax(dim=-1)), top_probability(logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden if self.norm is None else self.norm(hidden))

    def _mapped(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.token_map is None else self.token_map[ids]


class Likeliest(Protocol):
    """Finds the likeliest tokens of rows: a `LikeliestToken` or `TokenClusters`, or what stands in for one."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] into [rows] token ids."""
        ...

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn [rows, hidden_size] into [rows] token ids, and the probability [rows] of each among the scored ones."""
        ...


DraftInputs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A `DraftInput`, or what stands in for one."""


class DraftLayers(Protocol):
    """The layer of a draft head with what stands in front of it."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn [rows] tokens and [rows, hidden_size] hidden states into the live rows' output [live rows,
        hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """The layer of a draft head behind its input.

    Attributes:
        residual_is_normed: the layer adds to the normed hidden state, not to the one it was normed from.
    """

    inputs: DraftInputs
    layer: Layer
    rotary: RotaryTable
    residual_is_normed: bool

    def __call__(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        rows, normed = self.inputs(token_ids, hidden)
        stream = normed if self.residual_is_normed else hidden
        rotary = self.rotary.rows(attention.positions)
        return selection.live(self.layer(stream, rotary, cache, attention, selection, rows))


class ChainAtOnce(Protocol):
    """Drafts a chain in two calls, each draft of which is the likeliest token."""

    def start(
        self, verified: VerifiedRound, cache: LayerCache, drop: Drop | None, num_draft_tokens: int
    ) -> StartedDraft | None:
        """Run a catch-up step over the rows of `verified`, up to its first draft; do nothing, and return None, where
        that takes the head's parts."""
        ...

    def steps(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        num_draft_tokens: int,
    ) -> torch.Tensor:
        """Turn [batch] first drafts, and [batch, hidden_size] what they were read from, into all drafts [batch,
        num_draft_tokens]; the one-row metadata is moved in place."""
        ...


@dataclass(frozen=True, slots=True)
class RecurrentParts:
    """The parts of a draft head of one layer, from which a set of kernels makes the head.

    Attributes:
        fuse: of the target's features.
        features_are_normed: a norm stands before `fuse`.
        output_is_normed: a norm behind the layer makes what is fed back.
        residual_is_normed: see `HeadLayer`.
    """

    fuse: Linear
    inputs: DraftInput
    layer: LayerParts
    likeliest: LikeliestToken
    rotary: RotaryTable
    features_are_normed: bool
    residual_is_normed: bool
    output_is_normed: bool


@dataclass(frozen=True, slots=True)
class RecurrentKernels:
    """A draft head of one layer, as a set of kernels has made it.

    Attributes:
        run: does what `layer` does.
        chain: runs what a round asks of the head; None where the round calls the head for each draft.
    """

    fuse: Linear
    layer: HeadLayer
    likeliest: Likeliest
    run: DraftLayers
    chain: ChainAtOnce | None = None
