"""The results of a pass over a workload, as plain Python values for recorders and tables."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_lab.core.types import FinishReason


@dataclass(slots=True)
class RowCounts:
    """Counts of drafts and rows. These sentences are the definitions of `rows.drafted` and its kin in records.

    Attributes:
        drafted: Drafts that the draft steps of rounds made, offered or not, those of padded and surplus rows included;
            the prompt pass's are not in it. Of a tree its rows but for the root. Places for which ngram finds nothing
            count, in a chain and in a tree; of suffix those that it found.
        offered: Drafts that verification could accept. Fewer than were drafted where drafter.plan
            leaves some out. Places for which ngram finds nothing count here too.
        verified: Rows of the target's verify: pending tokens and drafts, those that are not offered and fill the shape,
            padded and surplus rows included.
        catchup_attention: Rows whose queries attended in the last layer of the drafter, in the passes of its catch-up
            step, padded and surplus rows included; mtp_vanilla has a pass for each draft, the others one. KV is written
            for all rows, whatever is pruned. Context rows of a block drafter end with that write; in these three counts
            they count if they are written.
        catchup_output: Rows of these passes in that layer's attention output product.
        catchup_mlp: Rows of these passes in that layer's MLP.
        catchup_live: Rows of these passes whose output anybody reads: one an active request and pass. P-EAGLE reads the
            output of K rows, and they count as one too.
        prefill_computed: Prompt rows that the target's last layer carried past its KV write.
        prefill_hidden: Prompt rows for which the target handed features to the drafter.
        prefill_logits: Prompt rows for which the target computed logits.
        prefill_shared: Prompt rows that entered the target's layers that only read KV (Gemma 4 E2B and E4B); 0 where
            there are none.
    """

    drafted: int = 0
    offered: int = 0
    verified: int = 0
    catchup_attention: int = 0
    catchup_output: int = 0
    catchup_mlp: int = 0
    catchup_live: int = 0
    prefill_computed: int = 0
    prefill_hidden: int = 0
    prefill_logits: int = 0
    prefill_shared: int = 0

    def add(self, other: RowCounts) -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """The number of distinct experts read, or their bytes, by stage.

    Experts are distinct within a layer and pass; the counts are summed over layers, passes and rounds.
    """

    verify: int
    catchup: int
    recur: int


@dataclass(slots=True)
class RoundRecord:
    """The engine's record of one round; lists have an entry for each request.

    Rounds that were launched together (`graph.rounds_per_replay`) each get an equal share of their time. A recorder
    writes the record as a line, `record.models.Round`, with the same figures.

    Attributes:
        stage_seconds: by stage, for the stages that could be timed separately.
        num_surplus: requests that had rows in the round although an earlier round had ended them. They have no entry in
            the lists.
        launch_seconds: the host's time to launch the round, before it waits for results; also an equal share.
        num_expected: the tokens that the plan expected of its requests; None without a plan.
        relaxed: drafts accepted only by relaxation; None for rules that never relax.
        distance: total variation and KL in nats between the emitted distribution and the target's for each request,
            summed over the rows that the round reached; None for rules without it.
    """

    index: int
    request_ids: list[str]
    accepted: list[int]
    emitted: list[int]
    truncated: list[bool]
    seconds: float
    stage_seconds: dict[str, float]
    rows: RowCounts
    relaxed: list[int] | None = None
    distance: list[list[float]] | None = None
    launch_seconds: float | None = None
    num_surplus: int = 0
    num_expected: float | None = None


@dataclass(slots=True)
class PrefillRecord:
    """The prompt pass of one request: all its chunks, the first sampled token and the first drafts.

    Attributes:
        seconds: in a forward over several prompts, the share in proportion to its rows.
    """

    request_id: str
    num_prompt_tokens: int
    num_chunks: int
    seconds: float
    rows: RowCounts


@dataclass(slots=True)
class RequestRecord:
    """One finished request. Times in seconds, relative to the start of the generation call.

    Attributes:
        offered_per_round: drafts that could have been accepted; in a tree, the most on one path.
        accepted_per_round: drafts that the rule accepted, before any cut by EOS or a limit.
        judged_per_round: tokens that the rule emitted, up to and including an EOS that ends the request, before any cut
            by a limit.
        emitted_per_round: tokens really emitted, without the first token from the prompt pass.
        confidence_per_round: for each offered draft of a chain, the drafter's estimate that it and all drafts before it
            are accepted; empty lists if nothing reads it.
        drafted_by: the name of the drafter of each round, if there are several; else empty.
        token_origins: a letter of `core.origins` for each of `output_ids`.
        truncated: whether the last round was cut by EOS or the length limit.
        turn: which turn of its conversation it is, from 1.
        arrived_at: when it was to begin (`Request.arrives_at`); `admitted_at` is when it got a slot.
        emitted_at: time of the first token, then of each round's tokens.
    """

    request_id: str
    category: str
    prompt_ids: list[int]
    output_ids: list[int]
    token_origins: str
    answer: str | None
    offered_per_round: list[int]
    accepted_per_round: list[int]
    judged_per_round: list[int]
    emitted_per_round: list[int]
    truncated: bool
    finish_reason: FinishReason
    max_new_tokens: int
    admitted_at: float
    emitted_at: list[float]
    confidence_per_round: list[list[float]] = field(default_factory=list)
    drafted_by: list[str] = field(default_factory=list)
    arrived_at: float = 0.0
    turn: int = 1


@dataclass(slots=True)
class GraphCounts:
    """Counts of an engine's captures and replays since the engine was made.

    On a GPU each graph of a round is captured twice, and the two are replayed in turn.

    `nodes`: the number of nodes in the latest graph of each segment; None if the device cannot count them.
    `rounds_per_replay`: the number of rounds in one graph, if it holds whole rounds. `no_loop`: the drafter has no
    draft loop to capture.
    """

    mode: str = "eager"
    captures: int = 0
    replays: int = 0
    nodes: dict[str, int | None] = field(default_factory=dict)
    rounds_per_replay: int = 1
    no_loop: bool = False


@dataclass(slots=True)
class GenerationResult:
    """Everything one pass over a workload produced.

    Attributes:
        experts_read: distinct experts read in its rounds; None if no layer has experts.
        expert_bytes_read: the bytes of their weights.
        num_wasted_rounds: rounds that ran after the device had ended all their requests, since they were launched
            together with others. They have no record, and their time is added to that of the others.
        num_prompt_forwards: forwards of the target over chunks of one or more prompts.
    """

    requests: list[RequestRecord]
    rounds: list[RoundRecord]
    prefills: list[PrefillRecord]
    graph: GraphCounts
    num_draft_tokens: int
    seconds: float
    experts_read: ExpertCounts | None = None
    expert_bytes_read: ExpertCounts | None = None
    num_wasted_rounds: int = 0
    num_prompt_forwards: int = 0
