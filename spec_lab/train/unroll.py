"""The interface of unrolled drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.train.drafter_config import UnrolledTrainingConfig
from spec_lab.train.packed_rows import RowPlaces

if TYPE_CHECKING:
    pass


class TapsRead(Protocol):
    """The outputs of a target forward that drafters read."""

    @property
    def final_hidden(self) -> Tensor:
        """`[batch, length, hidden]` after the last norm."""

    def taps(self) -> Tensor:
        """Return `[batch, length, taps * hidden]`: the tapped states, concatenated."""


class UnrolledDrafter(nn.Module, ABC):
    """The interface of a drafter for the loss and the evaluation. The module holds the drafter's own parameters only.

    Texts of `length` tokens have `rows = length - 1` rows: row p takes token p+1 and the target's states at p.
    """

    @abstractmethod
    def features(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the states of the target that the drafter reads, at positions 0..length-2."""

    @abstractmethod
    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Return a state `[batch, rows, ...]` for each step. Row p of `embeddings` `[batch, rows, hidden]` is token
        p+1's.

        Row p of step s drafts token p+2 from the anchor p-s. It uses the inputs known at the anchor, and the text's
        tokens p-s+2..p+1 as the earlier drafts. Rows p < s may hold any finite values. `rows` gives their places if
        several documents share a row; without it each row is one document.
        """

    @abstractmethod
    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[batch, rows, draft_vocab_size]`."""

    @abstractmethod
    def draft_token_ids(self) -> Tensor:
        """Return `[draft_vocab_size]`: the target id of every draft id."""


class UnderFrozenHead(UnrolledDrafter):
    """Modules that read the target's final hidden state, and use the target's head.

    Attributes:
        head_weight: `[vocab, hidden]` of the target.
    """

    head_weight: Tensor

    def features(self, outputs: TapsRead) -> tuple[Tensor, ...]:
        """Return the final hidden state after the norm, `[batch, rows, hidden]`."""
        return (outputs.final_hidden[:, :-1],)

    def draft_token_ids(self) -> Tensor:
        """Return the whole vocabulary."""
        return torch.arange(len(self.head_weight), device=self.head_weight.device)

    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[..., vocab]` from the module's output, which is already normed."""
        return F.linear(state.to(self.head_weight.dtype), self.head_weight)


def unrolled_loss_words(config: UnrolledTrainingConfig) -> str:
    """Describe the loss for a card."""
    decay = config.step_loss_decay
    return f"over {config.num_unrolled_steps} steps of EAGLE-3's training-time test, step i counting {decay:g}^i"
