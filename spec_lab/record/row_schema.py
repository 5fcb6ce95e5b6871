"""The schema of the lines of `requests.jsonl` and `rounds.jsonl`."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from spec_lab.record.schema import DivergenceKind, Rows


class RequestDivergence(TypedDict):
    """The first divergence from plain decoding. `record.measured.Divergence` explains the keys."""

    index: int
    margin: float | None
    kind: DivergenceKind


class RequestRow(TypedDict):
    """A line of `requests.jsonl`, from the first timed repeat. Times are in seconds from the start of that repeat.

    `token_origins` has a letter of `core.origins.TokenOrigin` for each of `output_ids`, and `text_ends` the number of
    characters of `text` after each token is decoded; null if unknown, as in older records. With
    drafter=hybrid, `drafted_by` has for each round the name of the part that drafted, or "" if none did. It is null for
    other drafters. `offered_per_round` is null in older records, whose rounds all offered K drafts.
    `confidence_per_round` has, for each offered draft of a chain, the drafter's estimate of the probability that this
    draft and all before it are accepted; null if neither `drafter.stop=confidence` nor `verify.budget` reads it.
    `answer_read` is the answer that `checker` found in the output; null without a checker, or if it found none.
    """

    id: str
    category: str
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    offered_per_round: NotRequired[list[int] | None]
    confidence_per_round: NotRequired[list[list[float]] | None]
    accepted_per_round: list[int]
    judged_per_round: NotRequired[list[int]]
    emitted_per_round: list[int]
    truncated: bool
    finish_reason: str
    admitted_at: float
    emitted_at: list[float]
    answer: str | None
    correct: bool | None
    checker: NotRequired[str | None]
    answer_read: NotRequired[str | None]
    divergence: RequestDivergence | None
    num_thinking_tokens: int | None
    drafted_by: NotRequired[list[str] | None]
    token_origins: NotRequired[str | None]
    text_ends: NotRequired[list[int] | None]


class RoundRow(TypedDict):
    """A line of `rounds.jsonl`: one round of the main configuration; lists have an entry for each of `request_ids`.

    It has the numbers of a `RoundRecord`, but is a separate type, since it is the layout of a file. Lines of older
    records must fit too, so some keys that are always written now may be missing. `num_surplus` counts requests that
    were also in the round, though an earlier round had ended them. They are not among `request_ids`.
    """

    repeat: int
    index: int
    request_ids: list[str]
    accepted: list[int]
    emitted: list[int]
    truncated: list[bool]
    seconds: float
    stage_seconds: dict[str, float]
    rows: Rows
    relaxed: list[int] | None
    launch_seconds: float | None
    num_surplus: NotRequired[int]
    distance: NotRequired[list[list[float | None]] | None]
    metrics: NotRequired[dict[str, float | None]]
