"""The proof of a drafter: its training forward and the runtime's draft step say the same of the same rows.

Both compute on a CPU in float32, from the files of the export, so that nothing but a mistake can part them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.core.types import Request
from spec_lab.errors import Breakdown
from spec_lab.record.acceptance_metrics import acceptance_length
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.packed_rows import PackedRows, RowPlaces
from spec_lab.train.packed_training import packed_inputs
from spec_lab.train.serving import Serving
from spec_lab.train.unroll import UnrolledDrafter

TOLERANCE = 1e-4
"""Of logits in float32, relative to the largest."""
TEXT_LENGTHS = (40, 56)
"""Of the two texts that are compared on, which stand in one row of the training forward."""
ORACLE_ROUNDS = 4
"""What the oracle decodes of each text, at least."""


class NotServed(Breakdown):
    """What is trained is not what the runtime computes. The message names the position."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared: the largest difference of logits at each position, and whether the drafts were the same."""

    differences: list[float]
    largest_logit: float
    same_drafts: bool

    def require(self) -> None:
        """Raise NotServed where the two disagree."""
        worst = max(self.differences)
        if worst > bound(self.largest_logit) or not self.same_drafts:
            raise NotServed(
                f"the training forward and the runtime differ by {worst:g} in logits of up to "
                f"{self.largest_logit:g}, by position {[f'{d:g}' for d in self.differences]}: "
                "this is a mistake of the lab"
            )


def bound(largest_logit: float) -> float:
    """Return how far two logits may lie apart."""
    return TOLERANCE * max(largest_logit, 1.0)


@torch.no_grad()
def training_logits(
    drafter: UnrolledDrafter, target: FrozenTarget, texts: Sequence[Tensor], taps: Sequence[Tap], num_steps: int
) -> list[list[Tensor]]:
    """Return of each text and step [rows, draft vocabulary]; all texts are packed into one row."""
    tokens = torch.cat(list(texts))[None].to(target.device)
    lengths = torch.tensor([len(text) for text in texts])
    segments = torch.repeat_interleave(torch.arange(1, len(texts) + 1), lengths)[None].to(target.device)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None].to(target.device)
    rows = PackedRows(tokens, segments, positions, torch.ones_like(tokens, dtype=torch.bool))
    embeddings, _, _, places, parts, *features = packed_inputs(target, drafter, rows, taps, num_steps)
    states = drafter.unroll(embeddings, tuple(features), num_steps, RowPlaces(places, parts))
    logits = [drafter.draft_logits(state)[0] for state in states]
    starts = lengths.cumsum(0) - lengths
    return [
        [of_step[start : start + length - 1] for of_step in logits]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def prove(
    drafter: UnrolledDrafter,
    name: str,
    target: FrozenTarget,
    serving: Serving,
    folder: Path,
    texts: Sequence[Tensor],
    taps: Sequence[Tap],
) -> Proof:
    """Compare a drafter with what its export in `folder` does, behind several prompts of each of several texts.

    The drafter, the target and the runtime compute in float32, with the values that were exported.
    """
    num_steps, engine = serving.num_draft_tokens, serving.engine(name, folder)
    differences, largest, same = [0.0] * num_steps, 0.0, True
    for text, of_text in zip(texts, training_logits(drafter, target, texts, taps, num_steps), strict=True):
        for prompt_length in sorted({2, len(text) // 2, len(text) - num_steps - 1}):
            served = serving.draft_logits(engine, text, prompt_length)
            for step in range(num_steps):
                trained = of_text[step][prompt_length - 1 + step]
                differences[step] = max(differences[step], float((trained - served[step]).abs().max()))
                largest = max(largest, float(trained.abs().max()))
                # Another token is the same draft where rounding alone parts the two.
                behind = float(trained.max() - trained[served[step].argmax()])
                same = same and behind <= bound(float(trained.abs().max()))
    return Proof(differences, largest, same)


@dataclass(frozen=True, slots=True)
class Prover:
    """A target as it trains and as it serves, and two pieces of text to compare the two on.

    Attributes:
        load: reads an export beside the first.
        taps: what the drafter reads.
    """

    target: FrozenTarget
    serving: Serving
    texts: tuple[Tensor, ...]
    load: Callable[[Path, FrozenTarget], UnrolledDrafter]
    taps: tuple[Tap, ...]

    @classmethod
    def of(
        cls,
        path: Path,
        tokens: Tensor,
        num_draft_tokens: int,
        load: Callable[[Path, FrozenTarget], UnrolledDrafter],
        taps: tuple[Tap, ...],
    ) -> Prover:
        """Load the target of `path` twice. `tokens` [any number, ids] is text of any kind."""
        cpu, longest = torch.device("cpu"), max(TEXT_LENGTHS) + ORACLE_ROUNDS * (num_draft_tokens + 1)
        longest += num_draft_tokens
        target = FrozenTarget.load(path, cpu, torch.float32, longest)
        serving = Serving.load(path, cpu, "float32", num_draft_tokens, 1, longest, "kernels=torch")
        # A folder with little text repeats itself: what the text says does not matter here.
        text = tokens.long().repeat(-(-sum(TEXT_LENGTHS) // len(tokens)))[: sum(TEXT_LENGTHS)]
        return cls(target, serving, text.split(list(TEXT_LENGTHS)), load, taps)

    def prove(self, name: str, folder: Path) -> Proof:
        """Compare what an export does when it is trained and when it is served, or raise NotServed."""
        drafter = self.load(folder, self.target).eval()
        proof = prove(drafter, name, self.target, self.serving, folder, self.texts, self.taps)
        proof.require()
        return proof

    def require_same(self, name: str, folder: Path, other: Path) -> None:
        """Raise NotServed where the runtime makes another drafter of another layout."""
        for text in self.texts:
            said = [
                self.serving.draft_logits(self.serving.engine(name, each), text, len(text) // 2)
                for each in (folder, other)
            ]
            if not torch.equal(*said):
                raise NotServed(f"{other} drafts otherwise than {folder}: this is a mistake of the lab")

    def require_oracle(self) -> None:
        """Raise NotServed where drafts that are all right are not all accepted."""
        num_drafts = self.serving.num_draft_tokens
        requests = [
            Request(f"text_{index}", "", tuple(text.tolist()), ORACLE_ROUNDS * (num_drafts + 1), ignore_eos=True)
            for index, text in enumerate(self.texts)
        ]
        reached = acceptance_length(self.serving.decode("oracle", None, requests), num_drafts)
        if reached != num_drafts + 1:
            raise NotServed(f"the oracle reaches {reached}, not {num_drafts + 1}: this is a mistake of the lab")
