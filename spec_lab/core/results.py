"""The results of a pass over a workload: plain Python values only, as recorders and tables read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_lab.core.types import FinishReason


@dataclass(slots=True)
class RowCounts:
    """The rows of verify, those that went on past the KV write in other passes, and drafts, counted on the host.

    Attributes:
        drafted: drafts that draft steps made, offered or not.
        offered: drafts that could be accepted.
        verified: rows of verify: pending tokens and drafts, offered or not.
        catchup_computed: rows the passes of the drafter's catch-up step carried past the KV write.
        catchup_live: rows of these passes whose output anybody reads (one an active request and pass).
        prefill_hidden: prompt rows for which the target handed features to the drafter.
        prefill_logits: prompt rows for which the target computed logits.
        prefill_shared: prompt rows that entered the target's layers that only read KV; 0 where there are none.
    """

    drafted: int = 0
    offered: int = 0
    verified: int = 0
    catchup_computed: int = 0
    catchup_live: int = 0
    prefill_hidden: int = 0
    prefill_logits: int = 0
    prefill_shared: int = 0

    def add(self, other: RowCounts) -> None:
        self.drafted += other.drafted
        self.offered += other.offered
        self.verified += other.verified
        self.catchup_computed += other.catchup_computed
        self.catchup_live += other.catchup_live
        self.prefill_hidden += other.prefill_hidden
        self.prefill_logits += other.prefill_logits
        self.prefill_shared += other.prefill_shared


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Different experts read, or bytes of them, layer by layer and pass by pass, summed over layers, passes and rounds;
    by stage."""

    verify: int
    catchup: int
    recur: int


@dataclass(slots=True)
class RoundRecord:
    """One round as the engine counted it; lists have an entry a request.

    Of rounds that were launched together (`graph.rounds_per_replay`) each has an equal share of the time they took.

    The line that a recorder writes of it is a `RoundRow`, which has the same figures.

    Attributes:
        stage_seconds: a key for each stage that could be told apart.
        num_surplus: requests that the round still had rows for, though an earlier one had ended them; they have no
            entry in the lists.
        launch_seconds: from the host's first call of the launch until it had launched all of the round,
            before it waits for results.
        relaxed: drafts accepted only because the rule relaxed; None for rules that never do.
        distance: of each request total variation and KL in nats between the emitted law and the target's, summed over
            the rows that the round reached; None for rules that do not say.
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


@dataclass(slots=True)
class PrefillRecord:
    """The prompt pass of one request: all its chunks, the first sampled token and the first drafts.

    Attributes:
        seconds: of a forward over several prompts, its share by rows.
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
        offered_per_round: drafts that could have been accepted, at that many positions of a tree.
        accepted_per_round: draft tokens the rule accepted, before any cut by EOS or a limit.
        judged_per_round: tokens the rule emitted up to and including EOS, before any cut by a limit.
        emitted_per_round: tokens really emitted; the prefill's token is not in it.
        confidence_per_round: of the drafts of a chain that a round offered, how likely the drafter thought it that each
            and all before it are accepted; empty lists where nobody reads it.
        drafted_by: the part that drafted for each round, where there are several; else empty.
        token_origins: a letter of `core.origins` for each of `output_ids`.
        truncated: the last round was cut by EOS or the length limit.
        emitted_at: time of the prefill token, then of each round's tokens.
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


@dataclass(slots=True)
class GraphCounts:
    """Counts how often an engine's graph mode captured, replayed, and fell back to eager, since the engine was made.

    On a GPU each graph of a round is captured twice, and the two are replayed in turn.

    `nodes`: of the last captured graph of each segment; None where the device does not tell. `rounds_per_replay`: how
    many rounds one graph holds, where it holds whole ones. `no_loop`: the drafter has no draft loop to capture.
    """

    mode: str = "eager"
    captures: int = 0
    replays: int = 0
    fallbacks: int = 0
    nodes: dict[str, int | None] = field(default_factory=dict)
    rounds_per_replay: int = 1
    no_loop: bool = False


@dataclass(slots=True)
class GenerationResult:
    """Everything one pass over a workload produced.

    Attributes:
        tree_rows: rows a request of each verify, None without a tree.
        experts_read: of its rounds; None where no layer has experts.
        expert_bytes_read: the bytes of their weights.
        num_wasted_rounds: rounds that ran behind the end of all their requests, since the host had launched them
            together with earlier ones; they have no record, and their time is in that of the others.
        num_prompt_forwards: of the target, each over chunks of one prompt or more.
    """

    requests: list[RequestRecord]
    rounds: list[RoundRecord]
    prefills: list[PrefillRecord]
    graph: GraphCounts
    num_draft_tokens: int
    seconds: float
    tree_rows: int | None = None
    experts_read: ExpertCounts | None = None
    expert_bytes_read: ExpertCounts | None = None
    num_wasted_rounds: int = 0
    num_prompt_forwards: int = 0
