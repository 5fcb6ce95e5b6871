"""A block drafter's model: a body, the choice of rows that are slots, and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.checkpoints.block_config import BlockConfig, HeadKind
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.models.blocks.body import BlockBody, BlockPlace
from spec_lab.models.blocks.confidence import ConfidenceHead
from spec_lab.models.blocks.heads import (
    BlockHead,
    BlockRows,
    GruHead,
    HeadParts,
    IndependentSlots,
    MarkovHead,
    SelectorHead,
)
from spec_lab.models.blocks.lattice import LatticeHead
from spec_lab.models.eagle3 import draft_to_target_ids
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.sandwich import LogitCap

Builder = Callable[[Any, HeadParts], BlockHead]
BUILDERS: dict[HeadKind, Builder] = {
    HeadKind.none: lambda sizes, parts: IndependentSlots(parts.scored),
    HeadKind.markov: MarkovHead,
    HeadKind.gru: GruHead,
    HeadKind.selector: SelectorHead,
    HeadKind.lattice: LatticeHead,
}


def build_head(parts: HeadParts) -> BlockHead:
    """Make the head that the config names."""
    sizes = parts.config.head
    return BUILDERS[sizes.kind](sizes, parts)


def build_confidence(parts: HeadParts) -> ConfidenceHead | None:
    """Make the confidence head, if there is one."""
    config = parts.config
    if not config.confidence_reads:
        return None
    reads_token = config.confidence_reads > config.body.hidden_size
    embedding = parts.tensors["markov_head.markov_w1.weight"] if reads_token else None
    return ConfidenceHead(parts.linear("confidence_head.proj"), embedding)


def drafted_rows(target_head: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of the target's head [vocab, hidden_size] for the tokens in `token_map`, or all if it is
    None."""
    return target_head if token_map is None else target_head[token_map]


@dataclass(frozen=True, slots=True)
class SlotLogits:
    """Turns hidden rows into logits: the product with the output head, then the file's factor and cap."""

    product: Linear
    config: BlockConfig

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = self.product(hidden), self.config.logit_softcap
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return logits if cap is None else LogitCap(cap)(logits)


class BlockModel:
    """Drafts the slots of a block; no state between calls.

    Attributes:
        body: writes context, and runs blocks.
        head: turns the slots into drafts.
        confidence: estimates whether a slot's draft will be accepted; None if the checkpoint has no such head.
    """

    def __init__(
        self,
        config: BlockConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        backend: AttentionBackend,
        max_positions: int,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        """`embedding` and `target_head` [vocab, hidden_size] are the target's, used if the checkpoint has none. Of
        `target_head`, only the rows for the tokens of the draft vocabulary are used."""
        self.config = config
        self.body = BlockBody(config, tensors, embedding, backend, max_positions=max_positions, kernels=kernels)
        token_map = draft_to_target_ids(tensors.get("d2t"))
        table = tensors.get("embed_tokens.weight", embedding)
        parts = HeadParts(config, tensors, table, token_map)
        self.head: BlockHead = build_head(parts)
        self.confidence = build_confidence(parts)
        head = tensors.get("lm_head.weight")
        product = kernels.get(Op.LINEAR, make_linear(drafted_rows(target_head, token_map) if head is None else head))
        self._logits = SlotLogits(product, config)

    def run(
        self, pending: torch.Tensor, context: torch.Tensor, place: BlockPlace, cache: PagedKVCache, num_drafts: int
    ) -> BlockRows:
        """Run the blocks that begin with `pending` [batch], and return the input of their head.

        `context` [batch, hidden_size] is the last context row of each request.
        """
        reading = self.config.slots
        num_slots = reading.most_drafts if self.head.reads_all_slots else num_drafts
        hidden = self.body.slots(pending, place, cache, reading.first_row, num_slots)
        return BlockRows(hidden, self._logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1), context)
