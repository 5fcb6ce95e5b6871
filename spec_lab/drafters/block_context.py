"""The pass of a block drafter whose context is made of the target's hidden states.

With prune.catchup=none each of the N verify rows becomes context: keys and values computed from the target's hidden
state there. Rejected rows lie past the committed length. The next block overwrites them, and the next round's context
overwrites the block. Context rows do not attend, so pruning saves only the writing of rejected rows. For that, the host
must wait for the number of accepted rows, so a round in a graph writes all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from spec_lab.core.kept import PrunePolicy
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, FeatureSpec, VerifiedRound
from spec_lab.drafters.block import RunBlock, Spans
from spec_lab.drafters.catchup import plan_catchup
from spec_lab.drafters.picking import DraftedRows
from spec_lab.models.blocks.body import BlockPlace
from spec_lab.models.blocks.model import BlockModel


@dataclass(kw_only=True, eq=False)
class ContextPass:
    """Writes context from the target's features, and runs blocks after it. Its KV cache uses the target's slots.

    Attributes:
        host_waits: whether the host may wait for the device in a round, which is not in a graph.
    """

    num_draft_tokens: int
    model: BlockModel
    features: FeatureSpec
    cache: PagedKVCache
    backend: AttentionBackend
    prune: PrunePolicy
    span: Spans
    kernels: KernelSet = TORCH_FORMS
    host_waits: bool = True

    def __post_init__(self) -> None:
        assert self.num_draft_tokens <= self.model.config.slots.most_drafts
        self.head = self.model.head
        self.requirements = DrafterRequirements(
            self.features,
            catchup_rows=(self.num_draft_tokens + 1,),
            counts_catchup=True,
            prunes_catchup=self.host_waits,
        )

    def of_prompts(self, pack: PromptPack) -> RunBlock | None:
        """Write the context of prompt chunks, and run a block after each prompt that ends."""
        assert pack.features is not None
        context, ends = self._write(pack.features, pack.attention), pack.ends
        if ends is None:
            return None
        place = BlockPlace(ends.kv_lens, ends.live.attention.page_table, ends.max_kv_len)
        return self._draft(ends.tokens, rows_at(context, ends.live.rows), place, DraftedRows.of_prompts(ends))

    def of_round(self, verified: VerifiedRound) -> RunBlock:
        """Write the context of rows L..L+K, or with pruning of the first n of them. Then run a block after the L + n
        committed rows."""
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        plan = plan_catchup(verified, self.backend, self.num_draft_tokens, self.kernels)
        features, attention, last = verified.features, plan.attention, plan.live_rows
        if self._gathers(batch.num_rows):
            features, attention, last = _accepted(features, attention, emitted.num_emitted)
        context = rows_at(self._write(features, attention), last)
        pending = emitted.tokens.gather(1, emitted.num_live.unsqueeze(1) - 1).squeeze(1)
        place = BlockPlace(plan.live_lens, batch.page_table, batch.max_kv_len + emitted.tokens.shape[1])
        return self._draft(pending, context, place, DraftedRows(batch.slot_ids, plan.live_lens))

    def _gathers(self, num_requests: int) -> bool:
        """Return whether only accepted rows are written."""
        return self.host_waits and self.prune.catchup(num_requests).is_inside

    def count_catchup(self, num_requests: int, num_live: int, num_verified: int) -> int:
        """Count the rows that a catch-up step writes."""
        return num_live if self._gathers(num_requests) else num_requests * num_verified

    def _write(self, features: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        with self.span("context"):
            return self.model.body.write(features, self.cache, attention)

    def _draft(self, pending: torch.Tensor, context: torch.Tensor, place: BlockPlace, rows: DraftedRows) -> RunBlock:
        with self.span("block"):
            slots = self.model.run(pending, context, place, self.cache, self.num_draft_tokens)
        return RunBlock(slots, pending, rows)


def _accepted(
    features: torch.Tensor, attention: AttentionMetadata, num_emitted: torch.Tensor
) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
    """Gather the first n rows of each request. The host waits for n.

    Returns:
        Their features, the metadata of where they are written, and the index [batch] of each active request's last
        row.
    """
    taken = torch.arange(attention.num_queries, device=num_emitted.device) < num_emitted.unsqueeze(1)
    rows = taken.flatten().nonzero().squeeze(1)
    gathered = replace(
        attention, positions=attention.positions[rows], slot_mapping=attention.slot_mapping[rows], num_queries=1
    )
    return rows_at(features, rows), gathered, (num_emitted.cumsum(0) - 1).clamp(min=0)
