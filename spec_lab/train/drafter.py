"""What the pipeline and the evaluation ask of a drafter's recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spec_lab.train.generations import Generations
from spec_lab.train.loop import CurvePoint

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

DraftMatcher = Callable[[Tensor, int], Tensor]
"""`(tokens [batch, length], num_draft_tokens) -> bool [batch, length, num_draft_tokens]`.

Entry [b, p, i]: drafting from position p, which knows tokens 0..p+1 of row b, draft i is the text's own token p+2+i,
given that the drafts before it were.
"""


class DrafterRecipe(Protocol):
    """Size and training of one kind of drafter: an option of the `drafter` group."""

    @property
    def name(self) -> str:
        """As in `drafter=NAME`; the weights go to `pocket-NAME`."""

    def train(
        self,
        model: Qwen3ForCausalLM,
        generations: Generations,
        always_drafted: list[int],
        folder: Path,
        checkpoint: Path,
        seed: int,
        device: torch.device,
    ) -> list[CurvePoint]:
        """Trains for the frozen target `model` on its own `generations` and saves the drafter to `folder`.

        `always_drafted`: token ids that must be draftable, however rare.
        """

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """The saved drafter beside its target, ready to be asked where it agrees with a text."""
