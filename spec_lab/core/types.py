"""The dataclasses that pass between parts.

Two kinds, never mixed: host state (`Request`, `Sequence`) and device state (`RoundBatch`, `AttentionMetadata`,
`TargetOutput`, `Verification`). A prompt pass's rows are in `spec_lab.core.prompts`, what a pass over a workload leaves
is in `spec_lab.core.results`.

Notation used in shapes: batch = rows of a round, N = num_draft_tokens + 1, L = committed KV length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from spec_lab.core.draft_tree import TreeRows
from spec_lab.core.recurrent_cache import RecurrentRows


class FinishReason(StrEnum):
    """The reason for which a request ended."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a user.

    Attributes:
        answer: the checkable answer, None where there is none.
        checker: what reads the answer given; None is the workload's.
        turns: what the user says in a conversation of several turns, the first of which `prompt_ids` holds; empty
            where there is one turn.
        system: what the model is told in front of a conversation; None where it is told nothing.
        num_draft_tokens: the most drafts of its rounds, 0 where it is not to be drafted for; None is K.
    """

    request_id: str
    category: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    answer: str | None = None
    ignore_eos: bool = False
    turns: tuple[str, ...] = ()
    checker: str | None = None
    system: str | None = None
    num_draft_tokens: int | None = None


@dataclass(slots=True)
class Sequence:
    """Host state of a running request. Between rounds `len(tokens) == kv_len + 1`: the last token is pending.

    Attributes:
        origins: a letter of `core.origins` for each output token.
        drafted_by: the part that drafted for each round that was launched, "" where none did; empty where one part
            drafts.
    """

    request: Request
    slot: int
    pages: list[int]
    admitted_at: float
    tokens: list[int]
    origins: str = ""
    kv_len: int = 0
    num_prefilled: int = 0
    offered_per_round: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    judged_per_round: list[int] = field(default_factory=list)
    emitted_per_round: list[int] = field(default_factory=list)
    confidence_per_round: list[list[float]] = field(default_factory=list)
    drafted_by: list[str] = field(default_factory=list)
    emitted_at: list[float] = field(default_factory=list)
    truncated: bool = False
    finish_reason: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < len(self.request.prompt_ids)


class NormSide(StrEnum):
    """The side of a final norm on which a hidden state is taken."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The hidden states of the target that a drafter reads, concatenated in this order.

    Attributes:
        layer_inputs: residual stream entering these layers (0-based, before any norm), ascending. EAGLE-3's taps.
        final_hidden: also append the last hidden state, on this side of the final norm.
        last_prompt_row: of a prompt only the last row is read, so that `prune.prefill=last_row` may drop the others.
    """

    layer_inputs: tuple[int, ...] = ()
    final_hidden: NormSide | None = None
    last_prompt_row: bool = False


@dataclass(slots=True)
class AttentionMetadata:
    """Everything that attention needs to know of one forward with `num_queries` query rows a request.

    Query row j of a request sees the keys at positions `[max(0, end - window), end)` with
    `end = seq_lens - (num_queries - 1 - j)`: the usual causal alignment to the end of the sequence.

    Attributes:
        positions: [batch * num_queries] RoPE position of each row, clamped into the cache.
        slot_mapping: [batch * num_queries] cache slot each row's K and V are written to.
        seq_lens: [batch] keys the last query row sees, at least 1.
        page_table: [batch, num_pages + 1] cache pages; unused columns and the last one hold the scratch page.
        num_queries: query rows a request.
        max_seq_len: upper bound of `seq_lens` known to the host, so that no kernel needs to ask the device.
        read_slots: [batch, max_seq_len] derived by backends that gather: slot of each key position, the null slot past
            the end.
        masks: additive masks by (window, query heads a KV head), derived when first needed and shared by the layers
            that have both; a draft head may group its heads in another way than the target.
        tree: what the rows see where they are those of a tree (`core.tree_protocols`); None where they are a chain.
        recurrent: the slots that the rows are of, for layers that have a state; None for a model without such layers.
        known_len: the `seq_lens` of all requests where the host knows them and they agree, as of prompts' chunks; None
            where it does not, as in a round.
        batches: where requests differ in their number of rows, the even batches that the rows are, one behind the
            other (`core.ragged`); `num_queries` is then the most of any. Empty where they do not differ.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    num_queries: int
    max_seq_len: int
    read_slots: torch.Tensor | None = None
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)
    tree: TreeRows | None = None
    recurrent: RecurrentRows | None = None
    known_len: int | None = None
    batches: tuple[AttentionMetadata, ...] = ()


@dataclass(slots=True)
class TargetOutput:
    """The outcome of a target's forward.

    Attributes:
        hidden: [kept rows, hidden_size] after the final norm.
        features: [all rows, feature_size] or None.
        num_shared_rows: rows that entered the layers behind the last one that writes KV; 0 where there are none.
    """

    hidden: torch.Tensor
    features: torch.Tensor | None
    num_shared_rows: int = 0


@dataclass(slots=True)
class RoundBatch:
    """Device state of one round, a row a request. Padded rows have `active` False and use the scratch slot.

    Attributes:
        slot_ids: [batch] slot of each row.
        active: [batch] bool.
        kv_lens: [batch] L at the start of the round.
        input_ids: [batch, N] the pending token and the drafts.
        page_table: [batch, num_pages + 1].
        max_kv_len: upper bound of `kv_lens` known to the host.
        num_drafts: [batch] how many of its drafts each request offers, of a tree those on the longest path; None where
            each offers all.
        num_draft_rows: [batch] how many of a tree's in all; None likewise, and of a chain.
        confidences: [batch, N - 1] how likely the drafter thought it that a draft and all before it are accepted; None
            where nobody reads it, and of a tree.
        parents: [batch, N] the row of each row's parent, where drafts are a tree; else None.
        recurrent: where verify finds the states of a target with recurrent layers; None for any other.
    """

    slot_ids: torch.Tensor
    active: torch.Tensor
    kv_lens: torch.Tensor
    input_ids: torch.Tensor
    page_table: torch.Tensor
    max_kv_len: int
    num_drafts: torch.Tensor | None = None
    num_draft_rows: torch.Tensor | None = None
    confidences: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    recurrent: RecurrentRows | None = None

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def draft_tokens(self) -> torch.Tensor:
        """The drafts that were verified [batch, num_draft_tokens]."""
        return self.input_ids[:, 1:]


@dataclass(slots=True)
class AcceptanceInputs:
    """The input of an acceptance rule: one verified round, a row a request.

    Attributes:
        logits: [batch, N, vocab] of the target; row j predicts the token after input j, so it judges draft j.
        draft_tokens: [batch, K] in target ids.
        active: [batch] bool; padded rows are False.
        slot_ids: [batch] slot of each row; padded rows have the scratch slot.
        kv_lens: [batch] L at the start of the round, the key of its noise.
        draft_logits: [batch, K, vocab] with q = softmax(draft_logits) the distribution each draft was really sampled
            from, temperature included, -inf outside the draft vocabulary; None for greedy drafts, whose q is one-hot.
        num_drafts: [batch] how many of its drafts each request offers; the others are only there to fill the shape, and
            the token behind the offered ones is the target's own. None where all are offered.
    """

    logits: torch.Tensor
    draft_tokens: torch.Tensor
    active: torch.Tensor
    slot_ids: torch.Tensor
    kv_lens: torch.Tensor
    draft_logits: torch.Tensor | None = None
    num_drafts: torch.Tensor | None = None

    @property
    def offered(self) -> torch.Tensor | None:
        """Tells of each draft [batch, K] whether it is offered; None where all are."""
        if self.num_drafts is None:
            return None
        columns = torch.arange(self.draft_tokens.shape[1], device=self.num_drafts.device)
        return columns < self.num_drafts.unsqueeze(1)


@dataclass(slots=True)
class Verification:
    """The decision of a rule on one round.

    Attributes:
        tokens: [batch, N] emitted tokens, junk from column n on.
        num_emitted: [batch] n, 0 for inactive rows.
        relaxed: [batch, K], 1 for accepted drafts that are not the target's argmax, else 0; None for rules that never
            relax.
        num_thinking: [batch] emitted tokens inside thinking, markers left out; None likewise.
        num_offered: [batch] drafts that were offered, of a tree those on the longest path, as the round notes it; None
            where all were.
        num_offered_rows: [batch] drafts of a tree that were offered in all; None likewise, and of a chain.
        num_drafted: [batch] drafts that were made for the next round, where only the device knows it; else None.
        distance: [batch, 2] total variation and KL in nats between the emitted law and the target's, summed over the
            rows that the round reached; None for rules that do not say.
        confidences: [batch, N - 1] those of the round's batch, as the round notes them; None likewise.
    """

    tokens: torch.Tensor
    num_emitted: torch.Tensor
    relaxed: torch.Tensor | None = None
    num_thinking: torch.Tensor | None = None
    num_offered: torch.Tensor | None = None
    num_offered_rows: torch.Tensor | None = None
    num_drafted: torch.Tensor | None = None
    distance: torch.Tensor | None = None
    confidences: torch.Tensor | None = None

    @property
    def num_live(self) -> torch.Tensor:
        """Emitted tokens [batch]: n, but 1 for an inactive row, whose metadata then moves like that of any other."""
        return self.num_emitted.clamp(min=1)


@dataclass(slots=True)
class VerifiedRound:
    """The input of a catch-up step, after accept: round, verification, and the target's features [batch * N,
    feature_size]. Of a tree only the accepted path is left, so that N is its depth + 1."""

    batch: RoundBatch
    verification: Verification
    features: torch.Tensor | None


@dataclass(slots=True)
class StartedDraft:
    """The outcome of a catch-up step and of reading its first drafts.

    Attributes:
        tokens: [batch] the first drafts.
        hidden: [batch, hidden_size] what they were read from.
        attention: one-row metadata of the live rows.
        live_lens: [batch] L + n, the committed length after this round, at least 1.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    attention: AttentionMetadata
    live_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One step of the draft loop.

    Attributes:
        index: 1..num_draft_tokens - 1, known to the host: frozen in a captured step, so only steps that differ in
            their weights may read it (`DrafterRequirements.distinct_steps`).
        column: [1] the same on the device, where a captured step that is replayed finds its number.
    """

    index: int
    column: torch.Tensor
