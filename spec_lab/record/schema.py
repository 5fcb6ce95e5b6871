"""The layout of `summary.json`, schema version 7. `record.row_schema` has that of the JSON Lines beside it.

The differences of each older version from the next one (`spec_lab/record/versions.py` converts them):

- Version 1 has no launches, graph nodes, or stages `draft` and `graph`.
- Version 2 leaves rounds cut short out of the acceptance length and the rates, and counts no surplus rounds. It has no
  `judged_per_round` and no `num_surplus`. Its stage `commit` includes what is now `readback`.
- Version 3 does not say where each token comes from.
- Version 4 has no rounds that offer fewer than K drafts, so no `offered_per_round`. Its `rows` do not count what was
  drafted, offered and verified. It counts no experts.
- Version 5 launches every round alone: it has no `wasted_rounds` and no `rounds_per_replay`. It does not say whether
  rows depend on each other (`row_invariant`).
- Version 6 counts experts but not their bytes. It times a round from its launch; since version 7 a round begins when
  the host has read the one before.

A later record of a version may have keys that an earlier one lacks. For example, records of version 7 first had no
`weight_dtype`, `template`, `thinking_markers` and `confidence_per_round`.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

SCHEMA_VERSION = 7

Status = Literal["finished", "failed", "refused", "interrupted"]
DivergenceKind = Literal["near_tie", "bug", "lossy"]

THIS_RUN = "this run"
"""The name of the main configuration in tables that also have its references."""


class PositionRates(TypedDict):
    """Acceptance rates, with an entry for each of K draft positions."""

    unconditional: list[float | None]
    conditional: list[float | None]
    reached: list[int]


class Ratio(TypedDict):
    """Median, lowest and highest of a ratio over paired repeats."""

    value: float
    low: float
    high: float
    over: str


class Latency(TypedDict):
    """Mean, median and 99th percentile in milliseconds, over requests; of `itl` over deliveries."""

    mean: float | None
    p50: float | None
    p99: float | None


class LatencyMs(TypedDict):
    """Latencies to the first token, of an output token, between deliveries, and of whole requests."""

    ttft: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency


class Rows(TypedDict):
    """Counts of drafts and rows. Records of schema version 4 and before lack the first three keys and the last."""

    drafted: NotRequired[int]
    offered: NotRequired[int]
    verified: NotRequired[int]
    catchup_computed: int
    catchup_live: int
    prefill_hidden: int
    prefill_logits: int
    prefill_shared: NotRequired[int]


class ExpertsReadByStage(TypedDict):
    """Number of different experts that a round reads, or their bytes, by stage."""

    verify: float
    catchup: float
    recur: float


READING_STAGES: tuple[Literal["verify", "catchup", "recur"], ...] = ("verify", "catchup", "recur")


class Graph(TypedDict):
    """The graph mode, its captures and its replays."""

    mode: str | None
    captures: int
    replays: int
    nodes: dict[str, int | None]
    rounds_per_replay: NotRequired[int]
    no_loop: NotRequired[bool]


class Accuracy(TypedDict):
    """The share of right answers among `n` that were checked, with a 95 % interval; `cut` of the `n` outputs ran into
    max_new_tokens."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    cut: NotRequired[int]


class AccuracyChange(TypedDict):
    """Right answers compared with a reference's on the same prompts, with a 95 % interval of the difference."""

    over: str
    n: int
    lost: int
    gained: int
    difference: float
    low: float
    high: float


class Relaxed(TypedDict):
    """Drafts that were accepted only because the rule is relaxed."""

    hits: int
    per_1000_tokens: float | None


class Distance(TypedDict):
    """Distance between the law that a token was drawn from and the target's, with a 95 % interval over requests."""

    total_variation: float
    low: float | None
    high: float | None
    kl: float | None


class Thinking(TypedDict):
    """Output tokens inside thinking, which may be cut before its end."""

    mean_tokens: float | None
    share: float | None


class Kernel(TypedDict):
    """One kernel of the profiled rounds; on a CPU, one operator."""

    name: str
    calls_per_round: float
    us_per_round: float


class RoundWork(TypedDict):
    """Work of host and GPU in a round, counted outside the timed part; null if no round was profiled. The GPU's time is
    also null on a CPU."""

    launches_per_round: float | None
    replays_per_round: float | None
    host_syncs_per_round: float | None
    gpu_busy_ms_per_round: float | None


class DivergenceCounts(TypedDict):
    """Requests that differ from plain decoding, by kind, with the median place and margin of the first difference."""

    requests: int
    diverged: int
    near_ties: int
    bugs: int
    lossy: int
    median_index: float | None
    median_margin: float | None


class Repeat(TypedDict):
    """One timed pass over the workload. Older records lack the last key."""

    decode_tokens_per_second: float | None
    end_to_end_tokens_per_second: float | None
    round_ms: float | None
    seconds: float
    prefill_ms_per_request: NotRequired[float | None]


class Speed(TypedDict):
    """The times and row counts of one configuration."""

    decode_tokens_per_second: float | None
    end_to_end_tokens_per_second: float | None
    repeats: list[Repeat]
    repeats_identical: bool | None
    round_ms: float | None
    launch_ms: float | None
    stage_ms_per_round: dict[str, float | None]
    prefill_ms_per_request: float | None
    prompt_forwards: NotRequired[int]
    rows: Rows
    experts_read: NotRequired[ExpertsReadByStage | None]
    expert_bytes_read: NotRequired[ExpertsReadByStage | None]
    graph: Graph
    wasted_rounds: NotRequired[int]
    metrics: NotRequired[dict[str, float | None]]


class PartCounts(TypedDict):
    """The rounds for which one part of a drafter drafted, and the drafts in them."""

    rounds: int
    offered: int
    accepted: int


class Outcome(TypedDict):
    """The results of some requests of one configuration, except times."""

    num_requests: int
    rounds: int
    emitted_tokens: int
    output_tokens: int
    acceptance_length: float | None
    acceptance_length_all: float | None
    acceptance_rate_by_position: PositionRates
    accuracy: Accuracy
    relaxed: Relaxed | None
    distance: NotRequired[Distance | None]
    parts: NotRequired[dict[str, PartCounts] | None]
    thinking: Thinking | None
    equal_to_plain: float | None


class Reference(Speed, Outcome):
    """A configuration that is compared with the main one; the two take turns."""


class DrafterSettings(TypedDict):
    """The settings of a drafter that reports read; a drafter has further keys."""

    name: str
    num_draft_tokens: NotRequired[int]


class AcceptanceSettings(TypedDict):
    """The settings that every rule has."""

    name: str


class RelaxedSettings(AcceptanceSettings):
    """The further settings of acceptance=relaxed_thinking."""

    form: Literal["delta", "ratio"]
    topk: int
    delta: float
    ratio: float
    phase: NotRequired[str]


class GraphSettings(TypedDict):
    """The settings of graph modes that reports read; each mode has some of them."""

    name: str
    overlap: NotRequired[bool]
    metadata: NotRequired[str]
    verify: NotRequired[bool]
    rounds_per_replay: NotRequired[int]


class AttentionSettings(TypedDict):
    """The settings that every attention backend has."""

    name: str


class Settings(TypedDict):
    """The keys of a record's `config` that are checked when it is read. Other keys are kept and compared unchecked."""

    batch_size: NotRequired[int]
    max_new_tokens: NotRequired[int]
    drafter: NotRequired[DrafterSettings]
    acceptance: NotRequired[AcceptanceSettings]
    graph: NotRequired[GraphSettings]
    attention: NotRequired[AttentionSettings]
    kernels: NotRequired[str]
    auto: NotRequired[list[str]]


class ExtensionOrigin(TypedDict):
    """The origin of a module outside this package: its version and the commit of its checkout, null if unknown."""

    version: str | None
    revision: str | None


class Memory(TypedDict):
    """The memory of a run: before anything was loaded, and its peak. `peak_cuda_bytes` is null on a CPU."""

    start_rss_bytes: int
    peak_rss_bytes: int
    peak_cuda_bytes: int | None


class Origin(TypedDict):
    """The run's name, its configuration, and the versions and hardware that it ran on."""

    name: str
    choices: dict[str, str]
    started_at: str
    config: dict[str, Any]
    versions: dict[str, str | None]
    git_revision: str | None
    device: str | None
    device_name: str | None
    cpu_model: str
    dtype: str | None
    num_threads: int | None
    extensions: NotRequired[dict[str, ExtensionOrigin]]
    world_size: NotRequired[int | None]
    weight_dtype: NotRequired[str | None]
    stored_types: NotRequired[list[str] | None]
    template: NotRequired[str | None]
    target_digest: NotRequired[str | None]
    thinking_markers: NotRequired[bool | None]


class Comparison(TypedDict):
    """The main configuration compared with its references."""

    references: dict[str, Reference]
    speedup: Ratio | None
    pruning_speedup: Ratio | None
    break_even_acceptance_length: float | None
    accuracy_change: AccuracyChange | None


class Results(Outcome, Speed, Comparison, RoundWork):
    """Everything that was measured. Older records lack `tree_rows`."""

    num_draft_tokens: int | None
    tree_rows: NotRequired[int | None]
    accepted_histogram: list[int]
    emitted_histogram: list[int]
    verify_calls: int
    latency_ms: LatencyMs
    gpu_idle_share: float | None
    kernels: list[Kernel]
    by_category: dict[str, Outcome]


class Summary(Origin, Results):
    """`summary.json`. A run without results has the same keys, with nulls, zeros and empty lists."""

    schema_version: int
    status: Status
    reason: str | None
    verdict: str
    seconds: float
    acceptance_imposed: bool
    acceptance_lossless: bool | None
    row_invariant: NotRequired[bool | None]
    memory: NotRequired[Memory | None]
    divergence: DivergenceCounts | None
    definitions: dict[str, str]
