"""Trains P-EAGLE. The engine's head runs over whole texts, followed by the mask rows of every anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.checkpoints.eagle3_config import Eagle3Config
from spec_lab.core.selection import AllRows
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.blocks.heads import IndependentSlots
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.linear import DenseLinear, Linear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.p_eagle import PEagleHead
from spec_lab.train.blocks.anchors import AnchoredRows
from spec_lab.train.blocks.attention import AnchoredAttention, AnchoredCache, AnchoredKV
from spec_lab.train.blocks.drafter import Joining, SlotDrafter
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.packed_attention import PackedAttention, PackedKV, PackedMetadata


class TextsAndMasks(AnchoredAttention):
    """The attention of texts followed by mask rows.

    A row of a text sees its text up to itself. An anchor's mask row sees the text's rows before the anchor, and the
    anchor's mask rows up to itself.
    """

    def __init__(self, rows: AnchoredRows, num_masks: int) -> None:
        super().__init__(rows)
        self._num_texts, lengths = rows.tokens.numel(), rows.lengths()
        masks = lengths.unsqueeze(1) + torch.arange(num_masks, device=lengths.device)
        self._of_texts = PackedMetadata.of(rows.segments, rows.positions)
        self._of_masks = self.build(masks, lengths, lengths, rows.tokens.shape[1] + num_masks)
        self.metadata = self.build(
            torch.cat((rows.positions.flatten(), masks.flatten()))[None], lengths, lengths, self._of_masks.max_seq_len
        )

    def write(self, cache: AnchoredKV, metadata: AttentionMetadata, keys: Tensor, values: Tensor) -> None:
        cache.context, cache.blocks = (
            (keys[rows], values[rows]) for rows in (slice(self._num_texts), slice(self._num_texts, None))
        )

    def attend(
        self, queries: Tensor, cache: AnchoredKV, metadata: AttentionMetadata, window: int | None, scale: float
    ) -> Tensor:
        assert cache.context is not None
        texts = PackedAttention().attend(
            queries[: self._num_texts], PackedKV(*cache.context), self._of_texts, window, scale
        )
        return torch.cat((texts, super().attend(queries[self._num_texts :], cache, self._of_masks, window, scale)))


@dataclass(frozen=True, slots=True)
class NormedLogits:
    """A norm followed by the product that gives logits."""

    norm: RMSNorm
    product: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(self.norm(rows))


class TrainablePEagle(SlotDrafter):
    """A P-EAGLE head. Row p of a text takes token p+1 and the tapped states at p.

    So the first draft after an anchor comes from the text's row before the anchor. The other drafts come from mask
    rows, which begin at the anchor's position.
    """

    def __init__(
        self, config: Eagle3Config, num_drafts: int, tensors: Mapping[str, Tensor], target: FrozenTarget
    ) -> None:
        super().__init__(num_drafts, tensors, target)
        self.config = config

    def slots(self, rows: AnchoredRows, tapped: Tensor) -> tuple[Tensor, Tensor]:
        shape, num_masks = rows.tokens.shape, self.num_slots - 1
        attention = TextsAndMasks(rows, num_masks)
        longest = shape[1] + num_masks
        backend: Any = attention
        rotary = self.rotary(self.config.layer.only_layer, longest)
        head = PEagleHead(
            self.config, self.tensors(), self._embedding, self._target_head, backend, longest, rotary=rotary
        )
        num_blocks = rows.anchors.numel()
        masks = rows.tokens.new_full((num_blocks * num_masks,), head.mask_token_id)
        tokens = torch.cat((F.pad(rows.tokens[:, 1:], (0, 1)).flatten(), masks))
        fused = torch.cat((head.fuse(tapped.flatten(0, 1)), head.mask_features.expand(len(masks), -1)))
        cache: Any = AnchoredCache(1 + len(self.config.more_layers))
        out = head.forward(tokens, fused, cache, attention.metadata, AllRows())
        texts, drafts = out.split((rows.tokens.numel(), len(masks)))
        first = rows.before(texts.view(*shape, -1))
        return torch.cat((first.unsqueeze(1), drafts.view(num_blocks, num_masks, -1)), dim=1), first

    def joining(self) -> Joining:
        tensors, vocab_size = self.tensors(), self.config.target_vocab_size
        norm = RMSNorm(tensors["norm.weight"], self.config.layer.rms_norm_eps)
        product = DenseLinear(tensors.get("lm_head.weight", self._target_head), None)
        head = IndependentSlots(lambda logits: SlotScores(logits, self.token_map, vocab_size))
        return Joining(NormedLogits(norm, product), head, None)
