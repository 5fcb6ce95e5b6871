"""The loss of blocks: compares each slot's distribution with the target's.

A slot is scored as if the drafts before it were the text's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from spec_lab.models.blocks.scores import SlotScores
from spec_lab.train.block_config import Normaliser, SlotTrainingConfig, SlotWeights
from spec_lab.train.blocks.anchors import BlockBatch
from spec_lab.train.blocks.drafter import Joining, SlotDrafter, WalkedSlot
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.group import ALONE, TrainingGroup
from spec_lab.train.losses import LOSSES, overlap
from spec_lab.train.packed_training import chunks

FLOOR = 0.5
"""D-PACE's smoothing: a token of probability p counts as accepted with probability FLOOR + (1 - FLOOR) * p."""
LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class SlotLaws:
    """Per-slot quantities of some blocks, each [blocks, slots].

    Attributes:
        loss: the loss of the slot's distribution, plus `alone_weight` times that of its logits before the head
            changes them.
        label: the probability of the text's own token.
        unsure: the cross-entropy of the confidence head against the probability of acceptance; 0 without such a head.
        reached: whether the head scores the text's own token in every earlier slot.
    """

    loss: Tensor
    label: Tensor
    unsure: Tensor
    reached: Tensor


class BlockLoss(nn.Module):
    """The weighted loss of the slots that count, divided as `normalise_by` says, plus the confidence head's weighted
    mean loss.

    Logits are computed for one chunk of blocks at a time. With several chunks they are recomputed for gradients, so
    that memory is bounded.
    """

    def __init__(
        self, drafter: SlotDrafter, target: FrozenTarget, config: SlotTrainingConfig, group: TrainingGroup = ALONE
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._target, self._config, self._group = target, config, group
        self._row_loss = LOSSES[config.loss]
        offset = 1.0 if config.slot_weights == SlotWeights.dspark else 0.0
        falling = torch.exp(-(torch.arange(drafter.num_slots) + offset) / config.slot_decay)
        self.register_buffer("falling", falling, persistent=False)

    falling: Tensor

    def forward(self, *tensors: Tensor) -> Tensor:
        """Compute the loss of a `BlockBatch`, given as its tensors."""
        batch, drafter = BlockBatch.of(*tensors), self.drafter
        rows = batch.rows
        hidden, context = drafter.slots(rows, batch.tapped)
        steps = torch.arange(drafter.num_slots + 1, device=hidden.device)
        states = rows.behind(batch.final_hidden, steps[:-1])
        parts = hidden, context, rows.behind(rows.tokens, steps), states, batch.counts.flatten(0, 1)
        pieces = chunks(len(hidden), drafter.num_slots * self._target.config.vocab_size)
        of_chunk = partial(self._sums, drafter.joining())
        if len(pieces) > 1:
            of_chunk = partial(recomputed, of_chunk, use_reentrant=False, preserve_rng_state=False)
        sums = torch.stack([of_chunk(*(part[piece] for part in parts)) for piece in pieces]).sum(0)
        divisors = sums[2:].detach()
        self._group.add_up(divisors)  # the mean is over the slots of all processes
        return (sums[:2] / divisors.clamp(min=LEAST)).sum()

    def _sums(
        self, joining: Joining, hidden: Tensor, context: Tensor, tokens: Tensor, states: Tensor, counts: Tensor
    ) -> Tensor:
        """Return [4]: the weighted sums of the slots' losses and of their confidence losses, and the divisor of
        each."""
        laws = self._laws(joining, hidden, context, tokens, states)
        counts = counts & laws.reached
        fixed = counts * self.falling
        weights = still_reached(laws.label, counts) if self._config.slot_weights == SlotWeights.dpace else fixed
        divisor = weights.sum() if self._config.normalise_by == Normaliser.weights else counts.sum()
        loss = torch.where(counts, weights * laws.loss, 0.0).sum()
        return torch.stack((loss, (fixed * laws.unsure).sum(), divisor.float(), fixed.sum()))

    def _laws(self, joining: Joining, hidden: Tensor, context: Tensor, tokens: Tensor, states: Tensor) -> SlotLaws:
        """Walk over the slots, given the text's own `tokens` [blocks, slots + 1]."""
        shape = hidden.shape[:2]
        log_p = self._target.log_probabilities(states.flatten(0, 1), self.drafter.draft_token_ids).unflatten(0, shape)
        rows = joining.rows(hidden, context)
        found = [
            self._slot(slot, log_p[:, number], tokens[:, number + 1])
            for number, slot in enumerate(joining.walked(rows, tokens))
        ]
        loss, label, unsure, scored = (torch.stack(part, 1) for part in zip(*found, strict=True))
        if self._config.alone_weight:
            loss = loss + self._config.alone_weight * self._row_loss(rows.logits, log_p)
        return SlotLaws(loss, label, unsure, F.pad(scored[:, :-1].cumprod(1), (1, 0), value=1).bool())

    def _slot(self, slot: WalkedSlot, log_p: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a slot's loss, the label's probability, the confidence loss, and whether the label is scored; each is
        [blocks]."""
        law = slot.law
        if law.ids is not None and law.ids.ndim == 2:
            log_p = log_p.gather(1, self.drafter.draft_ids[law.ids])
        with torch.no_grad():
            chance, is_scored = label_probability(law, label)
        unsure = torch.zeros_like(chance)
        if slot.sure is not None:
            accepted, sure = overlap(law.scores, log_p).detach(), slot.sure.clamp(LEAST, 1 - LEAST)
            unsure = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
        return self._row_loss(law.scores, log_p), chance, unsure, is_scored


def label_probability(law: SlotScores, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the tokens `label` [blocks], and whether they are scored."""
    scores = law.scores.float()
    mass = scores.logsumexp(1)
    if law.ids is None:
        return (scores.gather(1, label.unsqueeze(1)).squeeze(1) - mass).exp(), torch.ones_like(label, dtype=torch.bool)
    is_label = law.ids == label.unsqueeze(1)
    best = scores.masked_fill(~is_label, float("-inf")).amax(1)
    return (best - mass).exp(), is_label.any(1)


def still_reached(label: Tensor, counts: Tensor) -> Tensor:
    """Return D-PACE's weights (arXiv 2605.18810): of the counted slots from this one on, the expected number that are
    accepted, with `FLOOR`."""
    chance = ((1 - FLOOR) * label + FLOOR).cumprod(1) * counts
    return chance.flip(1).cumsum(1).flip(1) * counts
