"""A block drafter proposes all tokens of a round in one pass, which a head then joins from left to right.

The rows that verify ran become context: keys and values made of the target's hidden states, written for all N of them.
Rejected ones lie behind the committed length. The next block writes over them, and the next round's context over that.
So `prune.catchup` has nothing to gain by what is attended: it gathers the accepted rows, for which the host reads how
many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, DraftStep, FeatureSpec, Request, VerifiedRound
from spec_lab.drafters.catchup import catchup_planner
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.models.blocks.body import BlockPlace
from spec_lab.models.blocks.heads import Walk
from spec_lab.models.blocks.model import BlockModel
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet


@dataclass(slots=True)
class BlockState:
    """Holds the newest draft [batch], where the head stands, and which requests draft. Nothing moves between drafts."""

    tokens: torch.Tensor
    walk: Walk
    rows: DraftedRows
    attention: AttentionMetadata | None = None


class BlockDrafter:
    """Keeps the protocol `Drafter`. Its KV cache has the target's slot numbering."""

    def __init__(
        self,
        num_draft_tokens: int,
        model: BlockModel,
        features: FeatureSpec,
        cache: PagedKVCache,
        backend: AttentionBackend,
        prune: PrunePolicy,
        picker: DraftPicker,
        kernels: KernelSet = TORCH_FORMS,
        confidences: DraftConfidences | None = None,
    ) -> None:
        """`confidences`: where the model's own head notes how sure it is; None where the picker does, or nobody."""
        assert confidences is None or model.confidence is not None
        assert num_draft_tokens <= model.config.slots.most_drafts
        self.num_draft_tokens = num_draft_tokens
        self.gathers = prune.catchup.drops_rows
        self.requirements = DrafterRequirements(
            features, catchup_rows=(num_draft_tokens + 1,), count_catchup=_count_accepted if self.gathers else None
        )
        self.model = model
        self.cache = cache
        self.backend = backend
        self.picker = picker
        self._confidences = confidences
        self._plan = catchup_planner(kernels)
        device = cache.device
        self._columns = torch.arange(num_draft_tokens, device=device)

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: rows past a slot's length are never read."""

    def ingest(self, pack: PromptPack) -> BlockState | None:
        """Write the context of stretches of prompts; draft a block behind those that end there."""
        assert pack.features is not None
        context = self.model.body.write(pack.features, self.cache, pack.attention)
        ends = pack.ends
        if ends is None:
            return None
        place = BlockPlace(ends.kv_lens, ends.live.attention.page_table, ends.max_kv_len)
        return self._begin(ends.tokens, rows_at(context, ends.live.rows), place, DraftedRows.of_prompts(ends))

    def catch_up(self, verified: VerifiedRound) -> BlockState:
        """Write the context of rows L..L+K, and draft a block behind the L + n that are committed."""
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        plan = self._plan(verified, self.backend, self.num_draft_tokens)
        features, attention, last = verified.features, plan.attention, plan.live_rows
        if self.gathers:
            features, attention, last = _accepted(features, attention, emitted.num_emitted)
        context = rows_at(self.model.body.write(features, self.cache, attention), last)
        pending = emitted.tokens.gather(1, emitted.num_live.unsqueeze(1) - 1).squeeze(1)
        place = BlockPlace(plan.live_lens, batch.page_table, batch.max_kv_len + emitted.tokens.shape[1])
        rows = DraftedRows(batch.slot_ids, plan.live_lens)
        return self._begin(pending, context, place, rows)

    def step(self, state: BlockState, step: DraftStep) -> None:
        """Pick the next draft behind the newest one."""
        if self._confidences is not None:
            sure = self._sure(state.walk, state.tokens, step.column)
            self._confidences.go_on(state.rows.slot_ids, sure, step.column)
        scores = self.model.head.scores(state.walk, state.tokens, step.column)
        state.tokens = self.picker.pick(scores, state.walk.hidden, state.rows, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def _begin(self, pending: torch.Tensor, context: torch.Tensor, place: BlockPlace, rows: DraftedRows) -> BlockState:
        walk = self.model.draft(pending, context, place, self.cache, self.num_draft_tokens)
        if self._confidences is not None:
            self._confidences.begin(rows.slot_ids, self._sure(walk, pending, self._columns[:1]))
        scores = self.model.head.scores(walk, pending, self._columns[:1])
        return BlockState(self.picker.first(scores, walk.hidden, rows), walk, rows)

    def _sure(self, walk: Walk, previous: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Ask the model's own head; the token that is about to be drafted has no say in it."""
        assert self.model.confidence is not None
        return self.model.confidence(walk, previous, column)


def _accepted(
    features: torch.Tensor, attention: AttentionMetadata, num_emitted: torch.Tensor
) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
    """Gather the first n rows of each request, which the host waits for: features, where they are written, and the last
    row [batch] of each request among them."""
    taken = torch.arange(attention.num_queries, device=num_emitted.device) < num_emitted.unsqueeze(1)
    rows = taken.flatten().nonzero().squeeze(1)
    gathered = replace(
        attention, positions=attention.positions[rows], slot_mapping=attention.slot_mapping[rows], num_queries=1
    )
    return rows_at(features, rows), gathered, (num_emitted.cumsum(0) - 1).clamp(min=0)


def _count_accepted(num_emitted: Sequence[int], num_verified: int) -> int:
    return sum(num_emitted)
