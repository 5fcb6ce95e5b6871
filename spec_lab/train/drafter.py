"""This module says what the pipeline and the evaluation ask of a drafter's recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spec_lab.train.drafter_config import DrafterTrainingConfig
from spec_lab.train.generations import DrafterTexts
from spec_lab.train.loop import CurvePoint

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

DraftMatcher = Callable[[Tensor, int], Tensor]
"""`(tokens [batch, length], num_draft_tokens) -> bool [batch, length, num_draft_tokens]`.

Entry [b, p, i]: drafting from position p, which knows tokens 0..p+1 of row b, draft i is the text's own token p+2+i,
given that the drafts before it were.
"""


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The inputs that every recipe gets: the frozen target `model` and its own texts.

    `always_drafted`: token ids that must be draftable, however rare. `checkpoint`: the file that an interrupted
    training goes on from.
    """

    model: Qwen3ForCausalLM
    generations: DrafterTexts
    always_drafted: list[int]
    checkpoint: Path
    seed: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    """A drafter's part of its card, in Markdown without headings.

    `kind`: what it is with its article, as in "an EAGLE-3 head". `reading`: paragraphs about its sizes, what it reads
    and what it recycles. `loss`: what training compared with the target's probabilities, as in "over 5 steps of ...".
    """

    kind: str
    reading: str
    loss: str


class DrafterRecipe(Protocol):
    """Size and training of one kind of drafter: an option of the `drafter` group."""

    @property
    def config(self) -> DrafterTrainingConfig:
        """The option that was chosen. By its `name`, as in `drafter=NAME`, the weights go to `pocket-NAME`."""

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train a drafter and save it to `folder`; return the loss curve."""

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Return the saved drafter beside its target, ready to be asked where it agrees with a text."""

    def describe(self, folder: Path) -> DrafterDescription:
        """Return what the card says of the drafter in `folder`; all share data, curve, evaluation and limits."""
