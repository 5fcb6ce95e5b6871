"""A run's record: one `Run` in `summary.json`, a `Request` a line in `requests.jsonl`, a `Round` in `rounds.jsonl`.

A null says that nobody knows: the run did not measure it, or its engine does not tell. Numbers lie in one flat
dictionary by dotted names, such as `latency_ms.ttft.p99`; `spec_lab.record.metric` says which there are. So other
engines fill the same models, and a table needs no more than `pandas.json_normalize`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from spec_lab.core.results import RowCounts
from spec_lab.record.names import THIS_RUN, Status
from spec_lab.record.trace import Kernel

Numbers = dict[str, bool | int | float | None]


class Model(BaseModel):
    """Strict about names, so that a misspelt key is no silent null."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Divergence(Model):
    """The first token of a request that differs from plain decoding.

    Attributes:
        index: its index in `output_ids`; the length of the shorter output if one is a prefix of the other.
        margin: plain decoding's top-2 logit difference there; null if it was not computed.
        kind: `near_tie`, `bug`, or `lossy` under a rule that may differ.
    """

    index: int
    margin: float | None
    kind: Literal["near_tie", "bug", "lossy"]


class Request(Model):
    """A request of the first timed turn. Times are in seconds from the start of that turn.

    Attributes:
        turn: which turn of its conversation it is, from 1.
        offered_per_round: drafts that could have been accepted; in a tree, the most on one path.
        accepted_per_round: drafts that the rule accepted, before any cut.
        judged_per_round: tokens that the rule emitted, up to an end of sequence, before any cut by a limit.
        emitted_per_round: tokens that were given out, without the prompt pass's.
        rounds_histogram: `(offered, accepted, rounds)`, from engines that do not tell rounds one by one.
        confidence_per_round: for each offered draft of a chain, the drafter's estimate of the probability that it and
            all drafts before it are accepted.
        arrived_at: when it was to begin; `admitted_at` is when it got a slot.
        emitted_at: time of the first token, then of each round's tokens.
        divergence: from plain decoding by the same engine; `lab_divergence` is another engine's from the lab's.
        answer_read: the answer that `checker` found in the output.
        thinking_spans: stretches of `output_ids` inside thinking, markers left out; null without markers.
        drafted_by: by round, the part of drafter=hybrid that drafted, or "" if none did.
        token_origins: a letter of `core.origins.TokenOrigin` for each of `output_ids`.
        text_ends: number of characters of `text` after each token.
    """

    id: str
    category: str = ""
    turn: int = 1
    prompt_ids: list[int]
    output_ids: list[int]
    text: str = ""
    max_new_tokens: int | None = None
    finish_reason: str | None = None
    truncated: bool | None = None
    offered_per_round: list[int] | None = None
    accepted_per_round: list[int] | None = None
    judged_per_round: list[int] | None = None
    emitted_per_round: list[int] | None = None
    rounds_histogram: list[tuple[int, int, int]] | None = None
    confidence_per_round: list[list[float]] | None = None
    arrived_at: float | None = None
    admitted_at: float | None = None
    emitted_at: list[float] | None = None
    answer: str | None = None
    correct: bool | None = None
    checker: str | None = None
    answer_read: str | None = None
    divergence: Divergence | None = None
    lab_divergence: Divergence | None = None
    thinking_spans: list[tuple[int, int]] | None = None
    drafted_by: list[str] | None = None
    token_origins: str | None = None
    text_ends: list[int] | None = None


class Round(Model):
    """One round of the main configuration; lists have an entry for each of `request_ids`.

    Attributes:
        num_surplus: requests that were also in the round, though an earlier round had ended them.
        num_expected: the tokens that the plan expected of all requests; null without a plan.
        distance: total variation and KL in nats, summed over the rows that the round reached.
        metrics: the numbers of extensions' metrics.
    """

    repeat: int
    index: int
    request_ids: list[str]
    accepted: list[int]
    emitted: list[int]
    truncated: list[bool]
    seconds: float
    launch_seconds: float | None = None
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    rows: RowCounts = Field(default_factory=RowCounts)
    relaxed: list[int] | None = None
    distance: list[list[float | None]] | None = None
    num_surplus: int = 0
    num_expected: float | None = None
    metrics: Numbers = Field(default_factory=dict)


class RoundCost(Model):
    """What a plan measured: the time of a round of some requests that verifies and makes so many drafts for each."""

    num_requests: int
    num_offered: int
    num_made: int
    seconds: float


class Part(Model):
    """One configuration of a run: `part["rows.verified"]` is a number by its dotted name, null if there is none.

    Attributes:
        num_draft_tokens: K; 0 in plain decoding.
        repeats: the numbers of each timed turn.
        by_category: the numbers of the requests of each category.
    """

    num_draft_tokens: int | None = None
    metrics: Numbers = Field(default_factory=dict)
    repeats: list[Numbers] = Field(default_factory=list)
    by_category: dict[str, Numbers] = Field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.metrics.get(name)

    def under(self, name: str) -> Numbers:
        """Return the numbers whose names begin with a name, by what is behind it: `under("rows")["verified"]`."""
        return {key.removeprefix(f"{name}."): v for key, v in self.metrics.items() if key.startswith(f"{name}.")}


class Target(Model):
    """The model that decides.

    Attributes:
        digest: twelve digits of its configuration and weights, or of the shape of random weights.
        template: twelve digits of the chat template that wrote the prompts; `none` if there is none.
        weights: in words what the weights of its layers' products are kept in, and what they were widened and rounded
            from. Types of a GGUF file are in order, the one with the most numbers first.
    """

    name: str | None = None
    digest: str | None = None
    template: str | None = None
    dtype: str | None = None
    weights: str | None = None


class Machine(Model):
    """Where a run ran: no host name, user or path. What is not known before anything is loaded is null.

    Attributes:
        extensions: version and revision of the modules outside this package that added options, null if unknown.
    """

    versions: dict[str, str | None] = Field(default_factory=dict)
    git_revision: str | None = None
    cpu_model: str = ""
    device: str | None = None
    device_name: str | None = None
    num_threads: int | None = None
    world_size: int | None = None
    register_file: str | None = None
    extensions: dict[str, dict[str, str | None]] = Field(default_factory=dict)


class Run(Part):
    """A run, whether it finished or not.

    Attributes:
        verdict: its results in a sentence.
        seconds: wall time of the whole run.
        choices: the name of each group's choice, such as `{"prune": "catchup"}`.
        config: the resolved config, plain values only.
        started_at: UTC, ISO 8601.
        engine: what decoded, and its version.
        thinking: whether the template was asked for thinking; null if it was not asked.
        sampling: the sampling settings of the requests.
        acceptance_imposed: the rule sets how much is accepted, so that acceptance is not a result.
        acceptance_lossless: whether the rule promises the target's distribution.
        row_invariant: whether a row of the target's forwards of a few rows has the same bits alone.
        notes: what a reader of the numbers must know.
        references: the configurations that took turns with this one.
        costs: what the plan measured before the first round; empty without one.
        definitions: of each metric, by its name.
    """

    version: Literal[1] = 1
    status: Status
    reason: str | None = None
    verdict: str = ""
    seconds: float = 0.0
    name: str = "run"
    choices: dict[str, str] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    started_at: str = ""
    engine: str = "lab"
    engine_version: str | None = None
    target: Target = Field(default_factory=Target)
    thinking: bool | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    machine: Machine = Field(default_factory=Machine)
    acceptance_imposed: bool = False
    acceptance_lossless: bool | None = None
    row_invariant: bool | None = None
    notes: list[str] = Field(default_factory=list)
    references: dict[str, Part] = Field(default_factory=dict)
    kernels: list[Kernel] = Field(default_factory=list)
    costs: list[RoundCost] = Field(default_factory=list)
    definitions: dict[str, str] = Field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Part]:
        """Return the run itself, then its references, by name."""
        return {THIS_RUN: self, **self.references}

    def scalars(self) -> dict[str, bool | int | float]:
        """Return every number that the run has as `summary.NAME`, for searches and trackers."""
        return {f"summary.{name}": value for name, value in self.metrics.items() if value is not None}
