"""The dataclasses that pass between parts.

Some hold host state (`Request`, `Sequence`), and some device state (`RoundBatch`, `AttentionMetadata`, `TargetOutput`,
`Verification`). The rows of a prompt pass are in `spec_lab.core.prompts`, and the results of a pass over a workload in
`spec_lab.core.results`.

Notation in shapes: batch = requests in a round, L = committed KV length, K = drafts of a request in a chain, N = verify
rows of a request, which in a chain are K + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from spec_lab.core.draft_tree import TreeRows
from spec_lab.core.recurrent_cache import RecurrentRows
from spec_lab.core.text_stops import TextStops


class FinishReason(StrEnum):
    """Why a request ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        answer: the correct answer, if it can be checked; else None.
        checker: the checker of the answer; None for the workload's.
        turns: the user's messages in a conversation of several turns, for the request of its first turn; else empty.
            `prompt_ids` holds the first.
        system: the system message of a conversation; None without one.
        num_draft_tokens: the most drafts in its rounds; 0 for plain decoding, None for K.
        stop_token_ids: tokens that end it, besides the target's ends of sequence.
        stops: texts that end it; None if there are none.
        turn: which turn of its conversation it is, from 1.
        arrives_at: seconds after the start of a pass at which it arrives; None if it arrives when it gets a slot.
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
    turn: int = 1
    arrives_at: float | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stops: TextStops | None = None

    @property
    def has_stops(self) -> bool:
        """Return whether it has ends of its own, which only the host sees."""
        return self.stops is not None or bool(self.stop_token_ids)


@dataclass(slots=True)
class Sequence:
    """The host's state of a running request. Between rounds `len(tokens) == kv_len + 1`: the last token is pending.

    Attributes:
        origins: a letter of `core.origins` for each output token.
        drafted_by: the name of the drafter of each launched round, "" if nothing was drafted; empty if there is only
            one drafter.
        tree_per_round: the rows of a tree that were verified, and those of them that were accepted; empty for chains.
        num_waiting: drafts in its slot, after the newest launch.
        num_missed: rounds that the drafter has not seen, after the newest launch.
        waiting_confidences: the drafter's estimate that each waiting draft and all before it are accepted; None if not
            known yet, or never.
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
    tree_per_round: list[tuple[int, list[int]]] = field(default_factory=list)
    arrived_at: float = 0.0
    emitted_at: list[float] = field(default_factory=list)
    truncated: bool = False
    finish_reason: FinishReason | None = None
    num_waiting: int = 0
    num_missed: int = 0
    waiting_confidences: list[float] | None = None

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
        layer_inputs: residual stream entering these layers (0-based, before any norm), ascending; such as EAGLE-3's
            taps.
        final_hidden: also append the last hidden state, on this side of the final norm.
        last_prompt_row: only the last row of a prompt is read, so `prune.prefill=last_row` may drop the others.
    """

    layer_inputs: tuple[int, ...] = ()
    final_hidden: NormSide | None = None
    last_prompt_row: bool = False


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What decides which metadata a layer's attention reads: a KV cache group of vLLM.

    Attributes:
        cache_row: the shape of what the layer's cache holds for one token.
        window: the number of newest keys that a row sees; None for all.
        group: query heads for each KV head.
    """

    cache_row: tuple[int, ...]
    window: int | None
    group: int


@dataclass(slots=True)
class AttentionMetadata:
    """Everything that attention needs to know about a forward with `num_queries` query rows for each request.

    Query row j of a chain sees the keys at positions `[max(0, end - window), end)` with `end = seq_lens -
    (num_queries - 1 - j)`. This is the usual causal mask, aligned to the end of the sequence.

    Attributes:
        positions: [batch * num_queries] RoPE position of each row, clamped into the cache.
        slot_mapping: [batch * num_queries] cache slot to which each row's K and V are written.
        seq_lens: [batch] number of keys that the last query row of a chain sees, at least 1; of a tree, the keys of the
            prefix and of all its rows.
        page_table: [batch, num_pages + 1] cache pages; unused columns and the last one hold the scratch page.
        num_queries: query rows for each request.
        max_seq_len: upper bound of `seq_lens` known to the host, so that no kernel needs to ask the device.
        read_slots: [batch, max_seq_len] the slot of each key position, the null slot past the end. Backends that gather
            derive it.
        masks: additive masks by (window, query heads for each KV head), derived when first needed. Layers that agree in
            both share one. A draft head may group its heads differently than the target.
        tree: which keys the rows see if they form a tree (`core.draft_tree`); None for a chain.
        recurrent: the request slots of the rows, for layers that have a state; None for models without such layers.
        known_len: the common value of `seq_lens`, if the host knows it, as for chunks of a prompt; None if not, as in a
            round.
        batches: the even batches of a ragged forward, in order (`core.ragged`); empty if all requests have the same
            number of rows. In a ragged forward `num_queries` is the largest of any batch.
        window_lens: [batch] the lengths at whose ends windows end, if they are not `seq_lens` (graph.metadata=stale).
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
    window_lens: torch.Tensor | None = None

    def lens_in(self, window: int | None) -> torch.Tensor:
        """Return the lengths [batch] that a layer with this window reads in place of `seq_lens`."""
        return self.seq_lens if window is None or self.window_lens is None else self.window_lens


@dataclass(slots=True)
class TargetOutput:
    """The output of a target's forward.

    Attributes:
        hidden: [live rows, hidden_size], after the final norm.
        features: [rows, feature_size] for all rows, or for the kept rows if features include the final hidden state;
            None if the drafter reads none.
        num_shared_rows: rows that entered the layers after the last one that writes KV; 0 if there are no such layers.
    """

    hidden: torch.Tensor
    features: torch.Tensor | None
    num_shared_rows: int = 0


@dataclass(slots=True)
class RoundBatch:
    """The device state of one round, with a row for each request. Padded rows have `active` False and the scratch slot.

    Attributes:
        slot_ids: [batch] slot of each row.
        active: [batch] bool.
        kv_lens: [batch] L at the start of the round.
        input_ids: [batch, N] the pending token and the drafts.
        page_table: [batch, num_pages + 1].
        max_kv_len: upper bound of `kv_lens` known to the host.
        num_drafts: [batch] the number of drafts that each request offers; in a tree, the most on one path. None if all
            are offered.
        confidences: [batch, N - 1] the drafter's estimate that a draft and all drafts before it are accepted; None if
            nothing reads it, and for a tree.
        parents: [batch, N] the parent of each row in a tree; None for a chain.
        recurrent: where verify finds the states of a target with recurrent layers; None for other targets.
    """

    slot_ids: torch.Tensor
    active: torch.Tensor
    kv_lens: torch.Tensor
    input_ids: torch.Tensor
    page_table: torch.Tensor
    max_kv_len: int
    num_drafts: torch.Tensor | None = None
    confidences: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    recurrent: RecurrentRows | None = None

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def draft_tokens(self) -> torch.Tensor:
        """The drafts to verify [batch, N - 1]."""
        return self.input_ids[:, 1:]


@dataclass(slots=True)
class AcceptanceInputs:
    """The input of an acceptance rule: one verified round, with a row for each request.

    Attributes:
        logits: [batch, N, vocab] of the target; row j predicts the token after input j.
        draft_tokens: [batch, K] in target ids.
        active: [batch] bool; padded rows are False.
        slot_ids: [batch] slot of each row; padded rows have the scratch slot.
        kv_lens: [batch] L at the start of the round, part of the key of its random numbers.
        draft_logits: [batch, K, vocab]; each draft was sampled from q = softmax(draft_logits), which includes the
            temperature and is 0 outside the draft vocabulary. None for other drafts, whose q is one-hot.
        num_drafts: [batch] the number of drafts that each request offers; None if all are offered. The others are
            padding, and the token after the offered drafts is the target's own.
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
        """Return for each draft [batch, K] whether it is offered; None if all are."""
        if self.num_drafts is None:
            return None
        columns = torch.arange(self.draft_tokens.shape[1], device=self.num_drafts.device)
        return columns < self.num_drafts.unsqueeze(1)


@dataclass(slots=True)
class Verification:
    """The decision of a rule on one round. The round itself fills in the counts of drafts and the confidences.

    Attributes:
        tokens: [batch, N] emitted tokens, junk from column n on.
        num_emitted: [batch] n, 0 for inactive rows.
        relaxed: [batch, K] 1 for accepted drafts that are not the target's argmax, else 0; None if the rule does not
            count them.
        num_thinking: [batch] emitted tokens inside thinking, markers excluded; None if the rule does not count them.
        num_offered: [batch] drafts that were offered; in a tree, the most on one path. None if all were.
        distance: [batch, 2] total variation and KL in nats between the emitted distribution and the target's, summed
            over the rows that the round reached; None for rules without it.
        confidences: [batch, N - 1] as in `RoundBatch`.
        made_confidences: [batch, drafts] the same of the drafts that were made for the next round.
        path: [batch, depth + 1] the rows of a tree that are on the accepted path, from its root; None for a chain, or
            if nothing reads it.
    """

    tokens: torch.Tensor
    num_emitted: torch.Tensor
    relaxed: torch.Tensor | None = None
    num_thinking: torch.Tensor | None = None
    num_offered: torch.Tensor | None = None
    distance: torch.Tensor | None = None
    confidences: torch.Tensor | None = None
    made_confidences: torch.Tensor | None = None
    path: torch.Tensor | None = None

    @property
    def num_live(self) -> torch.Tensor:
        """The number of emitted tokens [batch], but 1 for an inactive row, so that its metadata advances like any
        other's."""
        return self.num_emitted.clamp(min=1)


@dataclass(slots=True)
class VerifiedRound:
    """The input of a catch-up step: the batch, its verification, and the target's features [batch * N, feature_size].

    Of a tree only the accepted path is in the verification and the features, so there N is the tree's depth + 1.
    """

    batch: RoundBatch
    verification: Verification
    features: torch.Tensor | None


@dataclass(slots=True)
class StartedDraft:
    """The outcome of a catch-up step whose first drafts have been picked.

    Attributes:
        tokens: [batch] the first drafts.
        hidden: [batch, hidden_size] the outputs from which they were picked.
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
        index: 1..num_draft_tokens - 1 on the host. A capture freezes it. So for a chain, only steps with weights of
            their own may read it (`DrafterRequirements.distinct_steps`); for a tree it is the level.
        column: [1] the same index on the device, which a replayed step reads.
    """

    index: int
    column: torch.Tensor
