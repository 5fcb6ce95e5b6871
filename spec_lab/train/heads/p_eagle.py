"""`drafter=p_eagle`: an EAGLE-3 head with mask rows after the pending token, which predict drafts; stored in the layout
of speculators, which vLLM reads.

Training runs the engine's head over whole texts, followed by the mask rows of every anchor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.checkpoints.eagle3_checkpoint import (
    Eagle3Config,
    default_tap_layer_inputs,
    eagle3_tensor_shapes,
    load_eagle3,
)
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.random_weights import random_tensors
from spec_lab.checkpoints.taps import Tap, taps_of_inputs
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata
from spec_lab.export.eagle3_json import write_eagle3_folder
from spec_lab.export.folders import in_bfloat16
from spec_lab.models.blocks.heads import IndependentSlots
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.linear import DenseLinear, Linear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.p_eagle import PEagleHead
from spec_lab.train.anchored import (
    Anchored,
    AnchoredAttention,
    AnchoredCache,
    AnchoredKV,
    AnchoredModule,
    AnchoredRows,
    Joining,
)
from spec_lab.train.data import Texts
from spec_lab.train.head import draft_vocabulary, vocabulary_maps
from spec_lab.train.heads.block import mask_token
from spec_lab.train.packed import PackedAttention, PackedKV, PackedMetadata
from spec_lab.train.target import FrozenTarget


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
        self,
        queries: Tensor,
        cache: AnchoredKV,
        metadata: AttentionMetadata,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert cache.context is not None and sinks is None
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


class PEagleModule(AnchoredModule):
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
            self.config,
            self.tensors(),
            self.embedding,
            self.target_head,
            backend=backend,
            max_positions=longest,
            rotary=rotary,
        )
        num_blocks = rows.anchors.numel()
        masks = rows.tokens.new_full((num_blocks * num_masks,), head.mask_token_id)
        tokens = torch.cat((F.pad(rows.tokens[:, 1:], (0, 1)).flatten(), masks))
        fused = torch.cat((head.fuse(tapped.flatten(0, 1)), head.mask_features.expand(len(masks), -1)))
        cache: Any = AnchoredCache(1 + len(self.config.more_layers))
        out = head.forward(tokens, fused, Pass(cache, attention.metadata))
        texts, drafts = out.split((rows.tokens.numel(), len(masks)))
        first = rows.before(texts.view(*shape, -1))
        return torch.cat((first.unsqueeze(1), drafts.view(num_blocks, num_masks, -1)), dim=1), first

    def joining(self) -> Joining:
        tensors, vocab_size = self.tensors(), self.config.target_vocab_size
        norm = RMSNorm(tensors["norm.weight"], self.config.layer.rms_norm_eps)
        product = DenseLinear(tensors.get("lm_head.weight", self.target_head), None)
        head = IndependentSlots(lambda logits: SlotScores(logits, self.token_map, vocab_size))
        return Joining(NormedLogits(norm, product), head, None)


@dataclass
class PEagle(Anchored):
    """The knobs of a P-EAGLE head; `num_drafts`: of a round, of which mask rows make all but the first."""

    name: str = "p_eagle"
    num_drafts: int = 7

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the taps of an EAGLE-3 head."""
        return taps_of_inputs(default_tap_layer_inputs(target.config.num_layers))

    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> PEagleModule:
        """Make an untrained head. Its last norm, and the output head of a narrow vocabulary, begin as the target's."""
        model, ids = target.config, draft_vocabulary(texts, target, self.draft_vocab_size)
        kept: dict[str, Tensor] = {}
        if len(ids) < model.vocab_size:
            kept = vocabulary_maps(ids, model.vocab_size)
            kept["lm_head.weight"] = target.head_weight[ids.to(target.device)].float().cpu()  # a copy, which is trained
        config = self._sizes(target, len(ids), mask_token(self, texts, model.vocab_size))
        shapes = eagle3_tensor_shapes(config)
        for name in ("embed_tokens.weight", "lm_head.weight"):  # the target's are used, or the copy above
            del shapes[name]
        tensors = random_tensors(shapes, torch.float32, torch.device("cpu"), seed)
        tensors["norm.weight"] = target.final_norm_weight.float().cpu()
        return PEagleModule(config, self.num_drafts, tensors | kept, target)

    def _sizes(self, target: FrozenTarget, draft_vocab_size: int, mask_token_id: int) -> Eagle3Config:
        model, like = target.config, target.plan
        plan = LayerPlan(
            like.num_heads,
            like.num_kv_heads,
            like.head_dim,
            rope=target.draft_rope,
            intermediate_size=like.intermediate_size,
        )
        return Eagle3Config(
            layer=replace(model, family="llama", layers=(plan,), gemma4=None, max_dense_positions=None),
            target_hidden_size=model.hidden_size,
            draft_vocab_size=draft_vocab_size,
            target_vocab_size=model.vocab_size,
            tap_layer_inputs=default_tap_layer_inputs(model.num_layers),
            norm_before_residual=False,
            more_layers=(plan,) * (self.num_layers - 1),
            mask_token_id=mask_token_id,
        )

    def save(self, module: PEagleModule, target: FrozenTarget, folder: Path) -> None:
        tensors, num_layers = in_bfloat16(module.tensors()), target.config.num_layers
        write_eagle3_folder(
            folder, module.config, tensors, "speculators", num_layers, num_drafts=module.num_slots, target="target"
        )

    def load(self, folder: Path, target: FrozenTarget) -> PEagleModule:
        config, tensors = load_eagle3(folder, target.config, torch.float32, "cpu", "peagle")
        return PEagleModule(config, self.num_drafts, tensors, target).to(target.device)

    def describe(self) -> str:
        return (
            f"A P-EAGLE head: it reads what an EAGLE-3 head reads, and has {self.num_layers} layers. The newest row "
            f"makes the first of {self.num_drafts} drafts, and a mask row behind it each other one, all in one pass."
        )
