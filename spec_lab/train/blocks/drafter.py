"""A block drafter that is trained: the runtime's model, made of weights that have gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.block_config import BlockConfig
from spec_lab.models.blocks.body import BlockBody, BlockPlace
from spec_lab.models.blocks.confidence import ConfidenceHead
from spec_lab.models.blocks.heads import BlockHead, BlockRows, HeadParts
from spec_lab.models.blocks.model import build_confidence, build_head
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.eagle3 import draft_to_target_ids
from spec_lab.models.linear import DenseLinear, Linear
from spec_lab.train.blocks.anchors import AnchoredRows
from spec_lab.train.blocks.attention import AnchoredAttention, AnchoredCache
from spec_lab.train.frozen_target import FrozenTarget


@dataclass(frozen=True, slots=True)
class WalkedSlot:
    """What blocks draft in one slot, and how sure the confidence head is of it [blocks]; None where there is none."""

    law: SlotScores
    sure: Tensor | None


@dataclass(frozen=True, slots=True)
class Joining:
    """What turns the slots of blocks into drafts.

    Attributes:
        confidence: None where the drafter has no such head.
    """

    logits: Linear
    head: BlockHead
    confidence: ConfidenceHead | None

    def rows(self, hidden: Tensor, context: Tensor) -> BlockRows:
        """Return the slots of blocks, [blocks, slots, hidden_size], as the head takes them; `context` [blocks,
        hidden_size] are the last context rows."""
        return BlockRows(hidden, self.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]), context)

    def walked(self, rows: BlockRows, tokens: Tensor) -> Iterator[WalkedSlot]:
        """Go through the slots, each behind the token before it; `tokens` [blocks, slots at least] begin with the
        pending one."""
        walk = self.head.begin(rows)
        for slot in range(rows.hidden.shape[1]):
            column = torch.tensor([slot], device=tokens.device)
            before = tokens[:, slot]
            sure = None if self.confidence is None else self.confidence(walk, before, column)
            yield WalkedSlot(self.head.scores(walk, before, column), sure)


class WeightsByName(nn.Module):
    """Weights under the names of their checkpoint, which hold dots; what is no weight goes along."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        self._names = names
        self.weights = nn.ParameterList(nn.Parameter(tensors[name].float()) for name in names)
        self._others = {name: tensor for name, tensor in tensors.items() if name not in names}

    def tensors(self) -> dict[str, Tensor]:
        """Return all of them by name."""
        return dict(zip(self._names, self.weights, strict=True)) | self._others


class TrainableBlock(WeightsByName):
    """A body and the head that joins its slots.

    Attributes:
        num_slots: the drafts of a block.
        draft_token_ids: [draft vocabulary] ids of the target.
        draft_ids: [vocabulary] the other way; 0 of what cannot be drafted.
    """

    draft_token_ids: Tensor
    draft_ids: Tensor

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], target: FrozenTarget) -> None:
        super().__init__(tensors)
        self.config = config
        self.num_slots = config.slots.most_drafts
        self._embedding, self._target_head = target.decoder.embedding, target.head_weight
        token_map = draft_to_target_ids(tensors.get("d2t"))
        ids = torch.arange(config.body.vocab_size) if token_map is None else token_map.cpu()
        self._is_cut = token_map is not None
        draft_ids = torch.zeros(config.body.vocab_size, dtype=torch.long).index_put((ids,), torch.arange(len(ids)))
        self.register_buffer("draft_token_ids", ids, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def slots(self, rows: AnchoredRows, tapped: Tensor) -> tuple[Tensor, Tensor]:
        """Run the blocks behind all anchors.

        Returns:
            Their slots [blocks, slots, hidden_size], and the last context row of each [blocks, hidden_size].
        """
        config, num_layers = self.config, self.config.body.num_layers
        attention, cache = AnchoredAttention(rows), cast(Any, AnchoredCache(num_layers))
        longest = rows.tokens.shape[1] + config.block_size
        body = BlockBody(config, self.tensors(), self._embedding, cast(Any, attention), longest)
        lengths, none = rows.lengths(), rows.anchors[:0]
        context = body.write(tapped.flatten(0, 1), cache, attention.build(rows.positions, none, none, longest))
        place = BlockPlace(lengths, none, longest)
        hidden = body.slots(rows.pending(), place, cache, config.slots.first_row, self.num_slots)
        last = rows.behind(context.view(*rows.tokens.shape, -1), torch.tensor([-1], device=lengths.device))
        return hidden, last.squeeze(1)

    def joining(self) -> Joining:
        """Make what turns them into drafts, of the weights as they are."""
        tensors = self.tensors()
        token_map = self.draft_token_ids if self._is_cut else None
        parts = HeadParts(self.config, tensors, self._embedding, token_map)
        logits = DenseLinear(tensors.get("lm_head.weight", self._target_head), None)
        return Joining(logits, build_head(parts), build_confidence(parts))
