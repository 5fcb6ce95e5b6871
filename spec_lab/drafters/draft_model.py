"""Drafts with a separate language model, which has its own KV cache (Leviathan et al. 2022, arXiv 2211.17192).

The model reads no features of the target. So its row at position p takes token t[p], where a draft head's row takes
t[p+1] and h[p]. The catch-up step runs every emitted token. If it ran only the newest one, as plain decoding does, full
acceptance would leave a hole in the cache: the last draft was picked, but never run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from spec_lab.core.kept import ALL_ROWS, Kept, PrunePolicy
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import LiveRows, PromptPack
from spec_lab.core.protocols import DrafterRequirements, Target
from spec_lab.core.ragged import build_metadata
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionKind, AttentionMetadata, DraftStep, FeatureSpec, VerifiedRound
from spec_lab.drafters.branching import BranchDrafter
from spec_lab.drafters.catchup import CaughtUp, CaughtUpDrafter, plan_catchup
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.drafters.siblings import SiblingPicker
from spec_lab.models.scored_tokens import ScoredTokens, top_probability


@dataclass(frozen=True, slots=True)
class LanguageModelHead:
    """Makes the model's output head a draft head over the target's vocabulary.

    Attributes:
        vocab_size: the target's, which may have other padding than the model's.
    """

    model: Target
    vocab_size: int

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden).argmax(dim=-1)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.logits(hidden)
        return logits.argmax(dim=-1), top_probability(logits)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(hidden)
        missing = self.vocab_size - logits.shape[-1]
        return logits if missing == 0 else F.pad(logits, (0, missing), value=float("-inf"))

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return the logits as scores of all tokens."""
        return ScoredTokens(self.target_logits(hidden))


@dataclass(kw_only=True, eq=False)
class DraftModelCatchup:
    """The first step of drafters that are language models. The KV cache uses the target's slot numbering: a row writes
    the slot of its position.

    Attributes:
        vocab_size: the target's; None if it is the model's.
    """

    num_draft_tokens: int
    model: Target
    cache: PagedKVCache
    backend: AttentionBackend
    prune: PrunePolicy
    kernels: KernelSet = TORCH_FORMS
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        self.requirements = DrafterRequirements(catchup_rows=(self.num_draft_tokens + 1,))
        self.head = LanguageModelHead(self.model, self.vocab_size or self.model.vocab_size)

    def take_prompts(self, pack: PromptPack) -> CaughtUp | None:
        """Run the tokens of the chunks. If a prompt ends, also run its sampled token, whose output gives draft 1."""
        ends = pack.ends
        if ends is None:
            self._forward(pack.token_ids, pack.attention, self.prune.prompt.in_drafter(None))
            return None
        longer = [replace(span, end=span.end + 1) if span.is_last else span for span in pack.spans]
        attention = build_metadata(self.backend, longer, pack.attention.page_table)
        self.backend.advance(ends.live.attention)  # from the prompt's last token to the sampled one
        row_ends = accumulate(span.num_rows for span in longer)
        last_rows = [end - 1 for span, end in zip(longer, row_ends, strict=True) if span.is_last]
        live = LiveRows(torch.tensor(last_rows, device=pack.token_ids.device), ends.live.attention)
        kept = self.prune.prompt.in_drafter(live)
        hidden = self._forward(_with_sampled(pack), attention, kept)
        return CaughtUp(hidden, ends.live.attention, DraftedRows.of_prompts(ends))

    def take_round(self, verified: VerifiedRound) -> CaughtUp:
        """Run the emitted tokens at L+1..L+N. The live row n - 1 is at L + n and sees L + n + 1 keys."""
        plan = plan_catchup(verified, self.backend, self.num_draft_tokens, self.kernels, first_position=1)
        kept = self.prune.of_catchup(plan.live_rows, plan.live_attention)
        hidden = self._forward(verified.verification.tokens.reshape(-1), plan.attention, kept)
        return CaughtUp(hidden, plan.live_attention, DraftedRows(verified.batch.slot_ids, plan.live_lens))

    def _forward(self, token_ids: torch.Tensor, attention: AttentionMetadata, kept: Kept) -> torch.Tensor:
        """Run tokens [rows], and return the live rows' output after the final norm, [live rows, hidden_size]."""
        return self.model.forward(token_ids, Pass(self.cache, attention, kept), FeatureSpec()).hidden


def _with_sampled(pack: PromptPack) -> torch.Tensor:
    """Return the tokens of the chunks, with the sampled token after each prompt that ends."""
    parts, first = [], 0
    for span in pack.spans:
        parts.append(pack.token_ids[first : first + span.num_rows])
        first += span.num_rows
        if span.is_last:
            parts.append(pack.next_token_ids[first - 1 : first])
    return torch.cat(parts)


@dataclass(slots=True)
class DraftModelState:
    """The newest drafts [batch], and one-row metadata that is advanced in place."""

    tokens: torch.Tensor
    attention: AttentionMetadata
    rows: DraftedRows


@dataclass(kw_only=True, eq=False)
class DraftModelDrafter(DraftModelCatchup, CaughtUpDrafter[DraftModelState]):
    """Drafts a chain with a small model.

    Attributes:
        kinds: those of the model's attention.
    """

    picker: DraftPicker
    kinds: tuple[AttentionKind, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requirements = replace(self.requirements, step_kinds=self.kinds)

    def step(self, state: DraftModelState, step: DraftStep) -> None:
        hidden = self._forward(state.tokens, state.attention, ALL_ROWS)
        state.tokens = self.picker.pick(self.head, hidden, state.rows, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def begin(self, live: CaughtUp) -> DraftModelState:
        return DraftModelState(self.picker.pick(self.head, live.hidden, live.rows), live.attention, live.rows)


@dataclass(kw_only=True, eq=False)
class DraftModelTreeDrafter(DraftModelCatchup, BranchDrafter):
    """Drafts a tree with a small model. A branch needs nothing of its ancestors but their KV."""

    shape: TreeShape[Any]
    siblings: SiblingPicker
    backend: TreeAttentionBackend

    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        return self._forward(branches.tokens.reshape(-1), attention, ALL_ROWS)
