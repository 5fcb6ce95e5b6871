"""Heads that draft a whole block after an anchor: anchors, attention without a paged cache, and the loss.

They are the engine's own models, built from weights that have gradients. A slot is scored as if the drafts before it
were the text's own tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.blocks.confidence import ConfidenceHead
from spec_lab.models.blocks.heads import BlockHead, BlockRows
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.eagle3 import draft_to_target_ids
from spec_lab.models.rope import RotaryTable, rotary_table
from spec_lab.train.group import Processes
from spec_lab.train.head import Forced, HeadRecipe
from spec_lab.train.losses import LOSSES, chunks, overlap
from spec_lab.train.packed import PackedRows, by_heads
from spec_lab.train.target import FrozenTarget

if TYPE_CHECKING:
    from spec_lab.engine.engine import Engine
    from spec_lab.train.serving import Serving

FORCED_ANCHORS = 32
"""The most anchors of each row whose drafts teacher forcing counts."""
FLOOR = 0.5
"""D-PACE's smoothing: a token of probability p counts as accepted with probability FLOOR + (1 - FLOOR) * p."""
LEAST = 1e-6


class SlotWeights(StrEnum):
    """The weight of a slot's loss; j is 1 for the first draft of a block, g is `slot_decay`."""

    exp = "exp"  # e^(-(j - 1) / g)
    dspark = "dspark"  # e^(-j / g), which differs from exp only with normalise_by=slots
    dpace = "dpace"  # the expected number of slots from j on that are accepted


class Normaliser(StrEnum):
    """What divides the weighted losses of a step."""

    weights = "weights"
    slots = "slots"


@dataclass(frozen=True, slots=True)
class AnchoredRows:
    """Rows of whole texts [batch, length], and where blocks begin in them.

    Attributes:
        anchors: [batch, anchors] ascending columns: the pending tokens of blocks. An anchor that is the first token of
            its text does not count.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor
    anchors: Tensor

    def pending(self) -> Tensor:
        """Return the tokens [batch * anchors] that blocks begin with."""
        return self.tokens.gather(1, self.anchors).flatten()

    def lengths(self) -> Tensor:
        """For each block, return the number of tokens before it in its text, [batch * anchors]."""
        return self.positions.gather(1, self.anchors).flatten()

    def behind(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Gather `rows` [batch, length, ...] at `offsets` from each anchor: [batch * anchors, offsets, ...]. Columns
        are clamped to the row."""
        length = self.tokens.shape[1]
        columns = (self.anchors.unsqueeze(2) + offsets).clamp(0, length - 1)
        starts = length * torch.arange(len(rows), device=rows.device)
        return rows.flatten(0, 1)[(columns + starts.view(-1, 1, 1)).flatten(0, 1)]

    def before(self, rows: Tensor) -> Tensor:
        """Gather the entry of `rows` [batch, length, width] directly before each anchor: [batch * anchors, width]."""
        return self.behind(rows, torch.full((1,), -1, device=rows.device)).squeeze(1)


def drawn_anchors(rows: PackedRows, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Draw distinct ascending columns [batch, num_anchors]; fewer if a row has fewer tokens.

    Columns are preferred at which a text does not begin, and at which the target wrote this token and the text's next
    one. Rows with too few of these get others as well, whose slots do not count.
    """
    texts = torch.where(rows.is_supervised, rows.segments, -1)
    allowed = (texts >= 0) & (texts == F.pad(texts[:, 1:], (0, 1), value=-1)) & (rows.positions > 0)
    order = torch.rand(texts.shape, generator=generator).to(texts.device) + allowed
    return order.topk(min(num_anchors, texts.shape[1]), dim=1).indices.sort(dim=1).values


def counted_slots(rows: PackedRows, anchors: Tensor, num_slots: int) -> Tensor:
    """Return bool [batch, anchors, num_slots]: draft j counts if the target wrote all tokens from the anchor to it,
    within one text that does not begin at the anchor."""
    texts = F.pad(torch.where(rows.is_supervised, rows.segments, -1), (0, num_slots), value=-1)
    columns = anchors.unsqueeze(2) + torch.arange(num_slots + 1, device=anchors.device)
    found = texts.gather(1, columns.flatten(1)).view(columns.shape)
    pending = found[:, :, :1]
    has_context = (rows.positions.gather(1, anchors) > 0).unsqueeze(2)
    return ((found[:, :, 1:] == pending) & (pending >= 0) & has_context).cumprod(2).bool()


@dataclass(slots=True)
class AnchoredKV:
    """The keys and values of one layer, each [rows, num_kv_heads, head_dim]: first the texts', then the blocks'."""

    context: tuple[Tensor, Tensor] | None = None
    blocks: tuple[Tensor, Tensor] | None = None


class AnchoredCache:
    """Replaces the KV cache during one forward: an `AnchoredKV` for each layer."""

    def __init__(self, num_layers: int) -> None:
        self.layers = tuple(AnchoredKV() for _ in range(num_layers))


class AnchoredAttention:
    """The part of an attention backend that block drafters use. Each anchor is a request.

    A row of a block sees the tokens of its text before the anchor, and the rows of its block up to its own position. In
    a non-causal layer all rows attend from the block's last position, so they see the whole block. In a layer with a
    window, they see only those within it.
    """

    rope_write: RopeWrite | None = None
    latent = None

    def __init__(self, rows: AnchoredRows) -> None:
        self._rows = rows

    def build(self, positions: Tensor, seq_lens: Tensor, page_table: Tensor, max_seq_len: int) -> AttentionMetadata:
        none = positions.new_zeros(0)
        return AttentionMetadata(
            positions.flatten(), none, none, none, num_queries=positions.shape[1], max_seq_len=max_seq_len
        )

    def advance(self, metadata: AttentionMetadata) -> None:  # pragma: no cover
        raise AssertionError("blocks have no draft loop")

    def write(self, cache: AnchoredKV, metadata: AttentionMetadata, keys: Tensor, values: Tensor) -> None:
        if cache.context is None:
            cache.context = keys, values
        else:
            cache.blocks = keys, values

    def attend(
        self,
        queries: Tensor,
        cache: AnchoredKV,
        metadata: AttentionMetadata,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with queries [rows, num_heads, head_dim] to the texts' and the blocks' keys and values, and return
        [rows, num_heads * head_dim]."""
        assert cache.context is not None and cache.blocks is not None, "only blocks have queries"
        assert sinks is None, "no drafter has sinks"
        keys, values = (by_heads(part, *self._rows.tokens.shape) for part in cache.context)
        (batch, num_anchors), num_queries = self._rows.anchors.shape, metadata.num_queries
        # [batch, kv heads, anchors, rows, heads of a KV head, head_dim]
        query = (queries * scale).view(batch, num_anchors, num_queries, keys.shape[1], -1, queries.shape[-1])
        query = query.transpose(2, 3).transpose(1, 2)
        own_keys, own_values = (
            part.view(batch, num_anchors, -1, *part.shape[1:]).permute(0, 3, 1, 2, 4) for part in cache.blocks
        )
        shape, length, size = query.shape[2:5], keys.shape[2], own_keys.shape[3]
        before = (query.flatten(2, 4) @ keys.transpose(-1, -2)).unflatten(2, shape)
        within = (query.flatten(3, 4) @ own_keys.transpose(-1, -2)).unflatten(3, shape[1:])
        positions = metadata.positions.view(batch, num_anchors, num_queries)
        seen = torch.cat((self._before(positions, window), self._within(positions, size, window)), dim=-1)
        weights = torch.cat((before, within), dim=-1).masked_fill(~seen[:, None, :, :, None], float("-inf")).softmax(-1)
        of_context, of_block = weights.split((length, size), dim=-1)
        mixed = (of_context.flatten(2, 4) @ values).unflatten(2, shape)
        mixed = mixed + (of_block.flatten(3, 4) @ own_values).unflatten(3, shape[1:])
        return mixed.permute(0, 2, 3, 1, 4, 5).reshape(queries.shape[0], -1)

    def _before(self, positions: Tensor, window: int | None) -> Tensor:
        """Return bool [batch, anchors, rows, length]: the tokens of the texts that each row of a block sees."""
        rows = self._rows
        column = torch.arange(rows.tokens.shape[1], device=positions.device)
        text = rows.segments.gather(1, rows.anchors).unsqueeze(2)
        seen = (rows.segments.unsqueeze(1) == text) & (column < rows.anchors.unsqueeze(2))
        seen = seen.unsqueeze(2).expand(-1, -1, positions.shape[2], -1)
        return seen if window is None else seen & (rows.positions[:, None, None, :] > positions.unsqueeze(3) - window)

    def _within(self, positions: Tensor, size: int, window: int | None) -> Tensor:
        """Return bool [batch, anchors, rows, block size]: the rows of its own block that each row sees."""
        first = self._rows.positions.gather(1, self._rows.anchors)[:, :, None, None]
        own = first + torch.arange(size, device=positions.device)
        seen = own <= positions.unsqueeze(3)
        return seen if window is None else seen & (own > positions.unsqueeze(3) - window)


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

    def walked(self, rows: BlockRows, tokens: Tensor) -> Iterator[tuple[SlotScores, Tensor | None]]:
        """Yield the scores of the slots in order, each after the text's token before it, and the confidence head's
        estimate [blocks], if there is such a head.

        Args:
            tokens: [blocks, at least the slots that the caller takes], from the pending token on.
        """
        walk = self.head.begin(rows)
        for slot in range(rows.hidden.shape[1]):
            column = torch.full((1,), slot, device=tokens.device)  # made on the device, without a copy
            before = tokens[:, slot]
            sure = None if self.confidence is None else self.confidence(walk, before, column)
            yield self.head.scores(walk, before, column), sure


class AnchoredModule(nn.Module, ABC):
    """The weights of a drafter of blocks, by their checkpoint names, which contain dots.

    Attributes:
        num_slots: the drafts of a block.
        draft_token_ids: [draft vocabulary] target ids.
        draft_ids: [vocabulary] the inverse map; 0 for tokens that cannot be drafted.
        embedding, target_head: of the target, [vocab, hidden].
    """

    draft_token_ids: Tensor
    draft_ids: Tensor

    def __init__(self, num_slots: int, tensors: Mapping[str, Tensor], target: FrozenTarget) -> None:
        super().__init__()
        self.num_slots = num_slots
        self._names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        # Copies, since a weight that begins as the target's must not be trained in the target.
        self.weights = nn.ParameterList(nn.Parameter(tensors[name].float().clone()) for name in self._names)
        self._others = {name: tensor for name, tensor in tensors.items() if name not in self._names}
        self.embedding, self.target_head = target.decoder.embedding, target.head_weight
        self._rotary: dict[int, RotaryTable] = {}
        token_map, vocab_size = draft_to_target_ids(tensors.get("d2t")), target.config.vocab_size
        ids = torch.arange(vocab_size) if token_map is None else token_map.cpu()
        self._is_cut = token_map is not None
        draft_ids = torch.zeros(vocab_size, dtype=torch.long).index_put((ids,), torch.arange(len(ids)))
        self.register_buffer("draft_token_ids", ids, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(zip(self._names, self.weights, strict=True)) | self._others

    @property
    def token_map(self) -> Tensor | None:
        """The target ids that can be drafted; None if all of them can."""
        return self.draft_token_ids if self._is_cut else None

    @abstractmethod
    def slots(self, rows: AnchoredRows, tapped: Tensor) -> tuple[Tensor, Tensor]:
        """Run the blocks after all anchors.

        Returns:
            Their slots [blocks, slots, hidden_size], and the last context row of each [blocks, hidden_size].
        """

    @abstractmethod
    def joining(self) -> Joining:
        """Make the part that turns slots into drafts, with the current weights."""

    def rotary(self, plan: LayerPlan, longest: int) -> RotaryTable:
        """Return the rotary table for a number of positions. It is made on the CPU, which is not possible while a step
        is captured, so it is cached."""
        if longest not in self._rotary:
            like = self.embedding
            self._rotary[longest] = rotary_table(plan.rope, plan.head_dim, longest, like.dtype, like.device)
        return self._rotary[longest]


@dataclass
class Anchored(HeadRecipe):
    """The knobs of drafters that draft all slots of a block in one pass.

    Attributes:
        num_anchors: blocks in each row of texts.
        mask_token_id: token of the mask rows; null is the one that the target writes least.
        draft_vocab_size: tokens that can be drafted, those that the target writes most; all if it has no more.
        num_layers: of the body.
        alone_loss: weight of a second loss, which compares the logits before the head changes them.
    """

    slot_weights: SlotWeights = SlotWeights.exp
    slot_decay: float = 4.0
    normalise_by: Normaliser = Normaliser.weights
    num_anchors: int = 128
    mask_token_id: int | None = None
    draft_vocab_size: int | None = 32_000
    num_layers: int = 2
    alone_loss: float = 0.0

    def drawn(self, rows: PackedRows, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (drawn_anchors(rows, self.num_anchors, generator),)

    @torch.no_grad()
    def inputs(
        self, module: AnchoredModule, target: FrozenTarget, rows: PackedRows, *drawn: Tensor
    ) -> tuple[Tensor, ...]:
        """Return tokens, segments, positions, anchors, which slots count [batch, anchors, slots], and the target's
        tapped and final states."""
        (anchors,) = drawn
        outputs = target.run(rows, self.taps(target))
        counts = counted_slots(rows, anchors, module.num_slots)
        anchored = rows.tokens.long(), rows.segments, rows.positions.long(), anchors
        return *anchored, counts, outputs.tapped, outputs.final_hidden

    def loss_module(self, module: AnchoredModule, target: FrozenTarget, group: Processes) -> nn.Module:
        return AnchoredLoss(module, target, self, group)

    @torch.no_grad()
    def laws(
        self, module: AnchoredModule, target: FrozenTarget, rows: PackedRows, pending: Tensor, num_drafts: int
    ) -> Tensor:
        *anchored, _, tapped, _ = self.inputs(module, target, rows, pending[None])
        scores = walked_slots(module, AnchoredRows(*anchored), tapped, num_drafts)
        return torch.stack([law.target_logits(law.scores) for law in scores], 1)

    def served(self, serving: Serving, engine: Engine, text: Tensor, prompt_length: int) -> Tensor:
        return serving.slot_laws(engine, text, prompt_length)

    @torch.no_grad()
    def forced(
        self, module: AnchoredModule, target: FrozenTarget, rows: PackedRows, num_drafts: int, batch_size: int
    ) -> Forced:
        counts, generator = Forced([0] * num_drafts, [0] * num_drafts), torch.Generator().manual_seed(0)
        for start in range(0, len(rows), batch_size):
            part = rows.rows(slice(start, start + batch_size))
            anchors = drawn_anchors(part, FORCED_ANCHORS, generator)
            *four, all_counted, tapped, final_hidden = self.inputs(module, target, part, anchors)
            anchored, counted = AnchoredRows(*four), all_counted.flatten(0, 1)
            states = anchored.behind(final_hidden, torch.arange(num_drafts, device=final_hidden.device))
            alive = counted[:, 0]
            with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.in_16_bits):
                for slot, law in enumerate(walked_slots(module, anchored, tapped, num_drafts)):
                    alive = alive & counted[:, slot]
                    counts.reached[slot] += int(alive.sum())
                    alive = alive & (law.greedy(law.scores) == target.likeliest(states[:, slot]))
                    counts.matched[slot] += int(alive.sum())
            mass = target.log_probabilities(states[:, 0], module.draft_token_ids).exp().sum(-1)
            counts.lost += float(((1 - mass) * counted[:, 0]).sum())
            counts.num_rows += int(counted[:, 0].sum())
        return counts


def walked_slots(module: AnchoredModule, rows: AnchoredRows, tapped: Tensor, num_drafts: int) -> Iterator[SlotScores]:
    """Yield the scores of the first slots of all blocks [batch * anchors], each after the text's own token."""
    hidden, context = module.slots(rows, tapped)
    tokens = rows.behind(rows.tokens, torch.arange(num_drafts, device=hidden.device))
    joining = module.joining()
    # The walk is lazy, so it never reaches later slots, for which `tokens` has no column.
    return (law for law, _ in islice(joining.walked(joining.rows(hidden, context), tokens), num_drafts))


class AnchoredLoss(nn.Module):
    """The weighted loss of the slots that count, divided as `normalise_by` says, plus the confidence head's weighted
    mean loss.

    Logits are computed for one chunk of blocks at a time. With several chunks they are recomputed for gradients, so
    that memory is bounded.
    """

    falling: Tensor

    def __init__(self, module: AnchoredModule, target: FrozenTarget, knobs: Anchored, group: Processes) -> None:
        super().__init__()
        self.module = module
        self._target, self._knobs, self._group, self._row_loss = target, knobs, group, LOSSES[knobs.loss]
        offset = 1.0 if knobs.slot_weights == SlotWeights.dspark else 0.0
        falling = torch.exp(-(torch.arange(module.num_slots) + offset) / knobs.slot_decay)
        self.register_buffer("falling", falling, persistent=False)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Compute the loss of `Anchored.inputs`."""
        *anchored, counts, tapped, final_hidden = tensors
        module, rows = self.module, AnchoredRows(*anchored)
        hidden, context = module.slots(rows, tapped)
        steps = torch.arange(module.num_slots + 1, device=hidden.device)
        states = rows.behind(final_hidden, steps[:-1])
        parts = hidden, context, rows.behind(rows.tokens, steps), states, counts.flatten(0, 1)
        pieces = chunks(len(hidden), module.num_slots * self._target.config.vocab_size)
        of_chunk = partial(self._sums, module.joining())
        if len(pieces) > 1:
            of_chunk = partial(recomputed, of_chunk, use_reentrant=False, preserve_rng_state=False)
        sums = torch.stack([of_chunk(*(part[piece] for part in parts)) for piece in pieces]).sum(0)
        divisors = sums[2:].detach()
        self._group.add_up(divisors)  # the mean is over the slots of all processes
        return (sums[:2] / divisors.clamp(min=LEAST)).sum()

    def _sums(
        self, joining: Joining, hidden: Tensor, context: Tensor, tokens: Tensor, states: Tensor, counts: Tensor
    ) -> Tensor:
        """Return [4]: the weighted sums of the slots' losses and of their confidence losses, and the divisor of each.

        The head walks over the slots, given the text's own `tokens` [blocks, slots + 1].
        """
        log_p = self._target.log_probabilities(states.flatten(0, 1), self.module.draft_token_ids)
        log_p = log_p.unflatten(0, hidden.shape[:2])
        rows = joining.rows(hidden, context)
        found = [
            self._slot(law, sure, log_p[:, number], tokens[:, number + 1])
            for number, (law, sure) in enumerate(joining.walked(rows, tokens))
        ]
        losses, label, unsure, scored = (torch.stack(part, 1) for part in zip(*found, strict=True))
        if self._knobs.alone_loss:
            losses = losses + self._knobs.alone_loss * self._row_loss(rows.logits, log_p)
        # A slot counts only if the head scores the text's own token in every earlier slot.
        counts = counts & F.pad(scored[:, :-1].cumprod(1), (1, 0), value=1).bool()
        fixed = counts * self.falling
        weights = still_reached(label, counts) if self._knobs.slot_weights == SlotWeights.dpace else fixed
        divisor = weights.sum() if self._knobs.normalise_by == Normaliser.weights else counts.sum()
        loss = torch.where(counts, weights * losses, 0.0).sum()
        return torch.stack((loss, (fixed * unsure).sum(), divisor.float(), fixed.sum()))

    def _slot(
        self, law: SlotScores, sure: Tensor | None, log_p: Tensor, label: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a slot's loss, the label's probability, the confidence loss, and whether the label is scored; each is
        [blocks]."""
        if law.ids is not None and law.ids.ndim == 2:
            log_p = log_p.gather(1, self.module.draft_ids[law.ids])
        with torch.no_grad():
            chance, is_scored = label_probability(law, label)
        unsure = torch.zeros_like(chance)
        if sure is not None:
            accepted, sure = overlap(law.scores, log_p).detach(), sure.clamp(LEAST, 1 - LEAST)
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
