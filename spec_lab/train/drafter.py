"""The protocol of a drafter's recipe, as the pipeline and the evaluation use it."""

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

Entry [b, p, i] is true if draft i from position p equals the text's token p+2+i. Drafting from position p knows tokens
0..p+1 of row b, and the drafts before i are the text's own tokens.
"""


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The inputs that every recipe gets: the frozen target `model`, and the texts to learn from.

    `always_drafted`: token ids that must be draftable, however rare. `checkpoint`: the file from which an interrupted
    training resumes.
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

    `kind`: its name with an article, such as "an EAGLE-3 head". `reading`: paragraphs about its sizes, its inputs and
    what it feeds back. `loss`: the words of the card about the loss, such as "over 5 steps of ...".
    """

    kind: str
    reading: str
    loss: str


class DrafterRecipe(Protocol):
    """Size and training of one kind of drafter: an option of the `drafter` group."""

    @property
    def config(self) -> DrafterTrainingConfig:
        """The chosen option. The name of the folder of weights ends with its `drafts_as`, as in `pocket-eagle3`."""

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train a drafter and save it to `folder`; return the loss curve."""

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Load the saved drafter for its target, and return a function that tells where it agrees with a text."""

    def describe(self, folder: Path) -> DrafterDescription:
        """Return the card's description of the drafter in `folder`. Data, curve, evaluation and limits are described
        elsewhere."""
