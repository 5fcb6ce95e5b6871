"""Drafters that reuse one draft layer for every draft.

The layer first catches up over N verified rows with the target's features. Then each draft step runs on the layer's own
output. EAGLE-3 (arXiv 2503.01840) and TensorRT-LLM's MTP-Eagle work like this, with different heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from spec_lab.core.kept import PrunePolicy
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionKind, AttentionMetadata, DraftStep, FeatureSpec, VerifiedRound
from spec_lab.drafters.branching import BranchDrafter
from spec_lab.drafters.catchup import CaughtUp, CaughtUpDrafter, plan_catchup
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.picking import DraftedRows, DraftHead, DraftPicker
from spec_lab.drafters.siblings import SiblingPicker

if TYPE_CHECKING:
    from spec_lab.operators.native_forwards import NativeChain


class DraftModule(DraftHead, Protocol):
    """A draft model of one layer with a KV cache.

    The output of `forward` is the input of `greedy`, and of the next draft step or the next module.
    """

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        """Run tokens t[p+1] [rows] and hidden states h[p] [rows, hidden_size], and return the live rows' output.

        The output has no rows if `kept` is empty.
        """
        ...


class RecurrentHead(DraftModule, Protocol):
    """A draft model of one layer that converts the target's features itself."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Turn the target's features [rows, feature_size] into inputs of `forward`, [rows, hidden_size]."""
        ...


def no_chain(head: RecurrentHead) -> NativeChain | None:
    """Return None: in torch a round calls the head for each draft. C does the work of `fuse`, `forward` and `greedy`
    for all drafts in two calls."""
    return None


@dataclass(kw_only=True, eq=False)
class RecurrentCatchup:
    """The first step of drafters that reuse one layer. The KV cache uses the target's slot numbering: a row writes the
    slot of its position.
    """

    num_draft_tokens: int
    head: RecurrentHead
    features: FeatureSpec
    cache: LayerCache
    backend: AttentionBackend
    prune: PrunePolicy
    kernels: KernelSet = TORCH_FORMS

    def __post_init__(self) -> None:
        self.requirements = DrafterRequirements(self.features, catchup_rows=(self.num_draft_tokens + 1,))

    def take_prompts(self, pack: PromptPack) -> CaughtUp | None:
        """Run the rows of prompt chunks. Only the last row of each prompt drafts."""
        assert pack.features is not None
        ends = pack.ends
        kept = self.prune.prompt.in_drafter(None if ends is None else ends.live)
        fused = self.head.fuse(pack.features)
        hidden = self.head.forward(pack.next_token_ids, fused, Pass(self.cache, pack.attention, kept))
        return None if ends is None else CaughtUp(hidden, ends.live.attention, DraftedRows.of_prompts(ends))

    def take_round(self, verified: VerifiedRound) -> CaughtUp:
        """Run the N verified rows, from L on, with the emitted tokens. The live row is n - 1 and sees L + n keys."""
        assert verified.features is not None
        plan = plan_catchup(verified, self.backend, self.num_draft_tokens, self.kernels)
        kept = self.prune.of_catchup(plan.live_rows, plan.live_attention)
        tokens = verified.verification.tokens.reshape(-1)
        fused = self.head.fuse(verified.features)
        hidden = self.head.forward(tokens, fused, Pass(self.cache, plan.attention, kept))
        return CaughtUp(hidden, plan.live_attention, DraftedRows(verified.batch.slot_ids, plan.live_lens))


@dataclass(slots=True)
class RecurrentState:
    """The newest draft [batch], the hidden states [batch, hidden_size] of the next step, and metadata that is advanced
    in place."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    attention: AttentionMetadata
    rows: DraftedRows


@dataclass(kw_only=True, eq=False)
class RecurrentDrafter(RecurrentCatchup, CaughtUpDrafter[RecurrentState]):
    """A `Drafter` that reuses one layer for a chain.

    Attributes:
        kinds: that of the layer's attention.
    """

    picker: DraftPicker
    kinds: tuple[AttentionKind, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._greedy_chain = self.kernels.get(Op.CHAIN_AT_ONCE, no_chain)(self.head)
        self.requirements = replace(self.requirements, step_kinds=self.kinds, drafts_rest=self._chain is not None)

    @property
    def _chain(self) -> NativeChain | None:
        return self._greedy_chain if self.picker.takes_likeliest else None

    def catch_up(self, verified: VerifiedRound) -> RecurrentState:
        return self._started(verified) or super().catch_up(verified)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def step(self, state: RecurrentState, step: DraftStep) -> None:
        state.hidden = self.head.forward(state.tokens, state.hidden, Pass(self.cache, state.attention))
        state.tokens = self.picker.pick(self.head, state.hidden, state.rows, step.column)

    def draft_rest(self, state: RecurrentState, num_drafts: int) -> torch.Tensor:
        assert self._chain is not None
        return self._chain.steps(state.tokens, state.hidden, self.cache, state.attention, num_drafts)

    def _started(self, verified: VerifiedRound) -> RecurrentState | None:
        """Run the catch-up step and pick draft 1 in one call; None if no such call is available."""
        if self._chain is None:
            return None
        draft = self._chain.start(
            verified, self.cache, self.prune.catchup(verified.batch.num_rows), self.num_draft_tokens
        )
        if draft is None:
            return None
        rows = DraftedRows(verified.batch.slot_ids, draft.live_lens)
        return RecurrentState(draft.tokens, draft.hidden, draft.attention, rows)

    def begin(self, live: CaughtUp) -> RecurrentState:
        tokens = self.picker.pick(self.head, live.hidden, live.rows)
        return RecurrentState(tokens, live.hidden, live.attention, live.rows)


@dataclass(kw_only=True, eq=False)
class RecurrentTreeDrafter(RecurrentCatchup, BranchDrafter):
    """Drafts a tree with one reused layer."""

    shape: TreeShape[Any]
    siblings: SiblingPicker
    backend: TreeAttentionBackend

    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        return self.head.forward(branches.tokens.reshape(-1), branches.hidden, Pass(self.cache, attention))
