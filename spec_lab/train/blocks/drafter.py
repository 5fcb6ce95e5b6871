"""A trainable block drafter: the engine's model, built from weights that have gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.block_config import BlockConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.models.blocks.body import BlockBody, BlockPlace
from spec_lab.models.blocks.confidence import ConfidenceHead
from spec_lab.models.blocks.heads import BlockHead, BlockRows, HeadParts
from spec_lab.models.blocks.model import SlotLogits, build_confidence, build_head, drafted_rows
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.eagle3 import draft_to_target_ids
from spec_lab.models.linear import DenseLinear
from spec_lab.models.rope import RotaryTable, rotary_table
from spec_lab.train.blocks.anchors import AnchoredRows, BlockBatch
from spec_lab.train.blocks.attention import AnchoredAttention, AnchoredCache
from spec_lab.train.frozen_target import FrozenTarget


@dataclass(frozen=True, slots=True)
class WalkedSlot:
    """One slot of all blocks.

    Attributes:
        law: its scores.
        sure: [blocks] the confidence head's estimate; None if the drafter has no such head.
    """

    law: SlotScores
    sure: Tensor | None


@dataclass(frozen=True, slots=True)
class Joining:
    """The part of a drafter that turns slots into drafts.

    Attributes:
        confidence: None if the drafter has no confidence head.
    """

    logits: Callable[[Tensor], Tensor]
    head: BlockHead
    confidence: ConfidenceHead | None

    def rows(self, hidden: Tensor, context: Tensor) -> BlockRows:
        """Return the head's input for slots `hidden` [blocks, slots, hidden_size]; `context` [blocks, hidden_size] is
        the last context row of each block."""
        return BlockRows(hidden, self.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]), context)

    def walked(self, rows: BlockRows, tokens: Tensor) -> Iterator[WalkedSlot]:
        """Yield the slots in order, each scored after the text's token before it.

        Args:
            tokens: [blocks, at least the slots that the caller takes], from the pending token on.
        """
        walk = self.head.begin(rows)
        for slot in range(rows.hidden.shape[1]):
            column = torch.full((1,), slot, device=tokens.device)  # made on the device, without a copy
            before = tokens[:, slot]
            sure = None if self.confidence is None else self.confidence(walk, before, column)
            yield WalkedSlot(self.head.scores(walk, before, column), sure)


class WeightsByName(nn.Module):
    """Weights by their checkpoint names, which contain dots. Tensors of integers or bools are kept beside them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        self._names = names
        self.weights = nn.ParameterList(nn.Parameter(tensors[name].float()) for name in names)
        self._others = {name: tensor for name, tensor in tensors.items() if name not in names}

    def tensors(self) -> dict[str, Tensor]:
        """Return all of them by name."""
        return dict(zip(self._names, self.weights, strict=True)) | self._others


class SlotDrafter(WeightsByName, ABC):
    """A drafter of whole blocks.

    Attributes:
        num_slots: the drafts of a block.
        draft_token_ids: [draft vocabulary] target ids.
        draft_ids: [vocabulary] the inverse map; 0 for tokens that cannot be drafted.
    """

    draft_token_ids: Tensor
    draft_ids: Tensor

    def __init__(self, num_slots: int, tensors: Mapping[str, Tensor], target: FrozenTarget) -> None:
        super().__init__(tensors)
        self.num_slots = num_slots
        self._embedding, self._target_head = target.decoder.embedding, target.head_weight
        self._rotary: dict[int, RotaryTable] = {}
        token_map, vocab_size = draft_to_target_ids(tensors.get("d2t")), target.config.vocab_size
        ids = torch.arange(vocab_size) if token_map is None else token_map.cpu()
        self._is_cut = token_map is not None
        draft_ids = torch.zeros(vocab_size, dtype=torch.long).index_put((ids,), torch.arange(len(ids)))
        self.register_buffer("draft_token_ids", ids, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @abstractmethod
    def slots(self, rows: AnchoredRows, tapped: Tensor) -> tuple[Tensor, Tensor]:
        """Run the blocks after all anchors.

        Returns:
            Their slots [blocks, slots, hidden_size], and the last context row of each [blocks, hidden_size].
        """

    @abstractmethod
    def joining(self) -> Joining:
        """Make the part that turns slots into drafts, with the current weights."""

    @property
    def token_map(self) -> Tensor | None:
        """Return the target ids that can be drafted; None if all of them can."""
        return self.draft_token_ids if self._is_cut else None

    def rotary(self, plan: LayerPlan, longest: int) -> RotaryTable:
        """Return the rotary table for a number of positions. It is made on the CPU, which is not possible while a step
        is captured, so it is cached."""
        if longest not in self._rotary:
            like = self._embedding
            self._rotary[longest] = rotary_table(plan.rope, plan.head_dim, longest, like.dtype, like.device)
        return self._rotary[longest]


class TrainableBlock(SlotDrafter):
    """A body and the head that relates its slots. If the tensors have no embedding or no output head, the target's is
    used, without being trained."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], target: FrozenTarget) -> None:
        super().__init__(config.slots.most_drafts, tensors, target)
        self.config = config
        self._frozen_head = drafted_rows(self._target_head, self.token_map)

    def slots(self, rows: AnchoredRows, tapped: Tensor) -> tuple[Tensor, Tensor]:
        config, num_layers = self.config, self.config.body.num_layers
        cache: Any = AnchoredCache(num_layers)
        attention: Any = AnchoredAttention(rows)
        longest = rows.tokens.shape[1] + config.block_size
        rotary = self.rotary(config.body.layers[0], longest)
        body = BlockBody(config, self.tensors(), self._embedding, attention, longest, rotary=rotary)
        lengths, none = rows.lengths(), rows.anchors[:0]
        context = body.write(tapped.flatten(0, 1), cache, attention.build(rows.positions, none, none, longest))
        place = BlockPlace(lengths, none, longest)
        hidden = body.slots(rows.pending(), place, cache, config.slots.first_row, self.num_slots)
        return hidden, rows.before(context.view(*rows.tokens.shape, -1))

    def joining(self) -> Joining:
        tensors = self.tensors()
        embedding = tensors.get("embed_tokens.weight", self._embedding)
        parts = HeadParts(self.config, tensors, embedding, self.token_map)
        logits = SlotLogits(DenseLinear(tensors.get("lm_head.weight", self._frozen_head), None), self.config)
        return Joining(logits, build_head(parts), build_confidence(parts))


def walked_slots(drafter: SlotDrafter, batch: BlockBatch, num_drafts: int) -> Iterator[SlotScores]:
    """Yield the scores of the first slots of all blocks [batch * anchors], each after the text's own token."""
    hidden, context = drafter.slots(batch.rows, batch.tapped)
    tokens = batch.rows.behind(batch.rows.tokens, torch.arange(num_drafts, device=hidden.device))
    joining = drafter.joining()
    # The walk is lazy, so it never reaches later slots, for which `tokens` has no column.
    return (slot.law for slot in islice(joining.walked(joining.rows(hidden, context), tokens), num_drafts))
