"""One draft layer is reused: it catches up over N verified rows with the target's features, then runs a row a step on
its own output. EAGLE-3 (arXiv 2503.01840) and TensorRT-LLM's MTP-Eagle are this, with other heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend, RowSelection
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.selection import AllRows
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionMetadata, DraftStep, FeatureSpec, Request, VerifiedRound
from spec_lab.drafters.branching import BranchDrafter
from spec_lab.drafters.catchup import CaughtUp, catchup_planner
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.picking import DraftedRows, DraftHead, DraftPicker
from spec_lab.drafters.siblings import SiblingPicker
from spec_lab.models.draft_parts import ChainAtOnce
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet


class DraftModule(DraftHead, Protocol):
    """A draft model of one layer with a KV cache. What `forward` returns is fed back, or goes on to the next module,
    and is read by `greedy`."""

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn [rows] tokens t[p+1] and [rows, hidden_size] hidden states h[p] into the live rows' output, which has no
        row for an empty selection."""
        ...


class RecurrentHead(DraftModule, Protocol):
    """A draft model of one layer that takes the target's features in a form of its own.

    Attributes:
        chain: does in two calls what `fuse`, `forward` and `greedy` do in many; None where nothing does.
    """

    @property
    def chain(self) -> ChainAtOnce | None: ...

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Turn the target's features [rows, feature_size] into what `forward` takes, [rows, hidden_size]."""
        ...


class RecurrentCatchup:
    """Takes the first step of every drafter that reuses one layer. Its KV cache has the target's slot numbering: a row
    writes its position's slot.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        head: RecurrentHead,
        features: FeatureSpec,
        cache: LayerCache,
        backend: AttentionBackend,
        prune: PrunePolicy,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.requirements = DrafterRequirements(features, catchup_rows=(num_draft_tokens + 1,))
        self.head = head
        self.cache = cache
        self.backend = backend
        self.prune = prune
        self._plan = catchup_planner(kernels)

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: rows past a slot's length are never read."""

    def take_prompts(self, pack: PromptPack) -> CaughtUp | None:
        """Run the rows of stretches of prompts; only the last one of each prompt goes on to drafting."""
        assert pack.features is not None
        ends = pack.ends
        selection = self.prune.prompt.drafter_selection(None if ends is None else ends.live)
        fused = self.head.fuse(pack.features)
        hidden = self.head.forward(pack.next_token_ids, fused, self.cache, pack.attention, selection)
        return None if ends is None else CaughtUp(hidden, ends.live.attention, DraftedRows.of_prompts(ends))

    def take_round(self, verified: VerifiedRound) -> CaughtUp:
        """Run the rows at L..L+K with the emitted tokens; the live row is n - 1, and sees L + n keys."""
        assert verified.features is not None
        plan = self._plan(verified, self.backend, self.num_draft_tokens)
        selection = self.prune.catchup.selection(plan.live_rows, plan.live_attention)
        tokens = verified.verification.tokens.reshape(-1)
        fused = self.head.fuse(verified.features)
        hidden = self.head.forward(tokens, fused, self.cache, plan.attention, selection)
        return CaughtUp(hidden, plan.live_attention, DraftedRows(verified.batch.slot_ids, plan.live_lens))


@dataclass(slots=True)
class RecurrentState:
    """The tokens [batch] of a draft, hidden [batch, hidden_size] to feed back, and metadata that is moved in place."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    attention: AttentionMetadata
    rows: DraftedRows


class RecurrentDrafter(RecurrentCatchup):
    """A `Drafter` that reuses one layer for a chain."""

    def __init__(
        self,
        num_draft_tokens: int,
        head: RecurrentHead,
        features: FeatureSpec,
        cache: LayerCache,
        backend: AttentionBackend,
        prune: PrunePolicy,
        picker: DraftPicker,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        super().__init__(num_draft_tokens, head, features, cache, backend, prune, kernels)
        self.picker = picker
        self._chain = head.chain if picker.takes_likeliest else None
        if self._chain is not None:
            self.requirements = replace(self.requirements, draft_rest=self._draft_rest)

    def ingest(self, pack: PromptPack) -> RecurrentState | None:
        live = self.take_prompts(pack)
        return None if live is None else self._begin(live)

    def catch_up(self, verified: VerifiedRound) -> RecurrentState:
        return self._started(verified) or self._begin(self.take_round(verified))

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def step(self, state: RecurrentState, step: DraftStep) -> None:
        state.hidden = self.head.forward(state.tokens, state.hidden, self.cache, state.attention, AllRows())
        state.tokens = self.picker.pick(self.head, state.hidden, state.rows, step.column)

    def _draft_rest(self, state: RecurrentState) -> torch.Tensor:
        assert self._chain is not None
        return self._chain.steps(state.tokens, state.hidden, self.cache, state.attention, self.num_draft_tokens)

    def _started(self, verified: VerifiedRound) -> RecurrentState | None:
        """Run the catch-up step up to draft 1 at once; None where it is to be run part by part."""
        if self._chain is None:
            return None
        draft = self._chain.start(verified, self.cache, self.prune.drop, self.num_draft_tokens)
        if draft is None:
            return None
        rows = DraftedRows(verified.batch.slot_ids, draft.live_lens)
        return RecurrentState(draft.tokens, draft.hidden, draft.attention, rows)

    def _begin(self, live: CaughtUp) -> RecurrentState:
        tokens = self.picker.first(self.head, live.hidden, live.rows)
        return RecurrentState(tokens, live.hidden, live.attention, live.rows)


class RecurrentTreeDrafter(RecurrentCatchup, BranchDrafter):
    """Drafts a tree with a layer that is reused."""

    def __init__(
        self,
        shape: TreeShape[Any],
        siblings: SiblingPicker,
        head: RecurrentHead,
        features: FeatureSpec,
        cache: LayerCache,
        backend: TreeAttentionBackend,
        prune: PrunePolicy,
    ) -> None:
        super().__init__(shape.depth, head, features, cache, backend, prune)
        self.shape = shape
        self.siblings = siblings
        self.tree_backend = backend

    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        return self.head.forward(branches.tokens.reshape(-1), branches.hidden, self.cache, attention, AllRows())
