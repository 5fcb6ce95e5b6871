"""Trains an unrolled drafter on packed rows of texts, with a frozen target run by the engine's code.

One step takes the target's states of its rows, unrolls the drafter over all of them at once, and compares the two at
tokens that the target wrote. On a GPU the host only draws the rows, so that the whole step can be replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.drafter_config import UnrolledTrainingConfig
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.group import ALONE, TrainingGroup
from spec_lab.train.kept_states import KeptStates
from spec_lab.train.loop import CurvePoint, Watch, train
from spec_lab.train.losses import LOSSES
from spec_lab.train.packed_rows import PackedRows, RowPlaces, TrainingTexts
from spec_lab.train.unroll import UnrolledDrafter

log = logging.getLogger(__name__)

MOST_LOGITS = 2**28
"""The most logits of a chunk of rows, for the target and for each step of the drafter: a gigabyte each in float32."""


@dataclass(frozen=True, slots=True)
class PackedTask:
    """The inputs of a recipe: a frozen target, and texts that it wrote.

    Attributes:
        taps: the hidden states of the target that drafters may read.
        checkpoint: the file from which an interrupted training resumes.
        kept_bytes: memory for caching hidden states.
    """

    target: FrozenTarget
    texts: TrainingTexts
    taps: tuple[Tap, ...]
    row_length: int
    checkpoint: Path
    seed: int
    device: torch.device
    watch: Watch | None = None
    group: TrainingGroup = ALONE
    kept_bytes: float = 0


def train_packed(drafter: UnrolledDrafter, config: UnrolledTrainingConfig, task: PackedTask) -> list[CurvePoint]:
    """Train `drafter` in place. It stays on the task's device."""
    drafter.to(task.device)
    rows = PackedRows.of(task.texts.packed(task.row_length, task.seed), task.device)
    log.info("%d rows of %d tokens, %.0f%% of them supervised", *facts_of(rows))

    def batch_of(step: int) -> tuple[Tensor, ...]:
        batch = rows.batch(step, config.optimisation.batch_size, task.seed)
        return batch.rows(slice(task.group.rank, None, task.group.size)).tensors()

    source = KeptStates(task.target, task.kept_bytes) if task.kept_bytes else task.target

    def inputs_of(*picked: Tensor) -> tuple[Tensor, ...]:
        return packed_inputs(source, drafter, PackedRows(*picked), task.taps, config.num_unrolled_steps)

    loss = PackedLoss(drafter, task.target, config, task.group)
    return train(
        loss,
        batch_of,
        config.optimisation,
        task.checkpoint,
        task.device,
        inputs_of=inputs_of,
        compiled=loss.compiled,
        watch=task.watch,
        group=task.group,
        in_16_bits=task.target.in_16_bits,
    )


def facts_of(rows: PackedRows) -> tuple[int, int, float]:
    """Return the number of rows, their length, and the percentage of tokens that the target wrote."""
    return rows.num_rows, rows.tokens.shape[1], 100 * float(rows.is_supervised.float().mean())


@torch.no_grad()
def packed_inputs(
    target: FrozenTarget | KeptStates, drafter: UnrolledDrafter, rows: PackedRows, taps: Sequence[Tap], num_steps: int
) -> tuple[Tensor, ...]:
    """Return the inputs of `PackedLoss` from rows [batch, length].

    There is a row for each token, so that shapes are even; the last two rows do not count.
    """
    outputs = target.run(rows, taps)
    return (
        target.embed(F.pad(rows.tokens.long()[:, 1:], (0, 1))),
        F.pad(outputs.final_hidden[:, 1:], (0, 0, 0, 1)),
        counted_rows(rows.segments, rows.is_supervised, num_steps),
        rows.positions,
        rows.segments,
        *(F.pad(feature, (0, 0, 0, 1)) for feature in drafter.features(outputs)),
    )


def counted_rows(segments: Tensor, is_supervised: Tensor, num_steps: int) -> Tensor:
    """Return bool [num_steps, batch, length]: the rows that a step counts.

    Row p of step s drafts token p+2 from the anchor p-s, whose next token is p-s+1. It counts if the target wrote both
    tokens, in one document.
    """
    length = segments.shape[1]
    documents = torch.where(is_supervised, segments, -1)
    drafted = F.pad(documents[:, 2:], (0, 2), value=-1)
    pending = (F.pad(documents[:, 1:], (step, 1), value=-2)[:, :length] for step in range(num_steps))
    return torch.stack([(drafted == document) & (drafted >= 0) for document in pending])


class PackedLoss(nn.Module):
    """The mean loss of every step over the rows that it counts; step i has the weight `decay ** i`.

    Logits are computed for one chunk of rows at a time. With several chunks they are recomputed for gradients, so that
    memory is bounded.
    """

    def __init__(
        self,
        drafter: UnrolledDrafter,
        target: FrozenTarget,
        config: UnrolledTrainingConfig,
        group: TrainingGroup = ALONE,
    ) -> None:
        super().__init__()
        self._group = group
        self.drafter = drafter
        self.num_steps = config.num_unrolled_steps
        self._target, self._row_loss = target, LOSSES[config.loss]
        weights = torch.tensor([config.step_loss_decay**step for step in range(self.num_steps)])
        self.register_buffer("step_weights", weights / weights.sum(), persistent=False)
        self._unroll: Callable[..., list[Tensor]] = drafter.unroll
        self._of_chunk: Callable[..., Tensor] = self._loss_of_chunk

    step_weights: Tensor

    def forward(
        self,
        embeddings: Tensor,
        next_hidden: Tensor,
        counts: Tensor,
        positions: Tensor,
        segments: Tensor,
        *features: Tensor,
    ) -> Tensor:
        """Compute the loss of `packed_inputs`."""
        states = self._unroll(embeddings, features, self.num_steps, RowPlaces(positions, segments))
        num_counted = counts.sum((1, 2))
        self._group.add_up(num_counted)  # the mean is over the rows of all processes
        weights = counts * (self.step_weights / num_counted.clamp(min=1))[:, None, None]
        hidden, weights, *flat = counting(
            next_hidden.flatten(0, 1), weights.flatten(1), [state.flatten(0, 1) for state in states]
        )
        cut = chunks(hidden.shape[0], self._target.config.vocab_size)
        if len(cut) == 1:
            return self._of_chunk(hidden, weights, *flat)
        total = torch.zeros((), device=embeddings.device)
        for rows in cut:
            parts = [state[rows] for state in flat]
            total = total + recomputed(
                self._of_chunk,
                hidden[rows],
                weights[:, rows],
                *parts,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return total

    def _loss_of_chunk(self, hidden: Tensor, weights: Tensor, *states: Tensor) -> Tensor:
        log_p = self._target.log_probabilities(hidden, self.drafter.draft_token_ids())
        total = torch.zeros((), device=hidden.device)
        for state, weight in zip(states, weights, strict=True):
            row_loss = self._row_loss(self.drafter.draft_logits(state), log_p)
            total = total + torch.where(weight > 0, weight * row_loss, 0.0).sum()
        return total

    def compiled(self, module: Any) -> Any:
        """Compile the unrolling and the loss of a chunk separately."""
        self._unroll, self._of_chunk = torch.compile(self.drafter.unroll), torch.compile(self._loss_of_chunk)
        return module


def counting(hidden: Tensor, weights: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Keep only the rows that some step counts, of `hidden` [rows, hidden], `weights` [steps, rows] and each state
    [rows, hidden].

    Rows of prompts need no logits. On a GPU all rows are kept, since a captured step has fixed shapes.
    """
    if hidden.device.type != "cpu":
        return hidden, weights, *states
    kept = (weights > 0).any(0).nonzero()[:, 0]
    return hidden[kept], weights[:, kept], *(state[kept] for state in states)


def chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Divide rows into parts with about `MOST_LOGITS` logits each at most; without rows there is one empty part.

    All parts have the same size if that takes at most twice as many parts. With two sizes torch.compile would make two
    functions. The recomputation for gradients might then use the other function, which PyTorch refuses.
    """
    needed = max(1, -(-num_rows * vocab_size // MOST_LOGITS))
    num_chunks = next((parts for parts in range(needed, 2 * needed + 1) if num_rows % parts == 0), needed)
    size = max(1, -(-num_rows // num_chunks))
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(1, num_rows), size)]
