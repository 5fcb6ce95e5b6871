"""Turns the engine's results into rows, and keeps the run's record valid at all times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from spec_lab.core.errors import describe_error
from spec_lab.record.measured import Divergence, Measured, RunInfo
from spec_lab.record.metrics import OwnMetrics
from spec_lab.record.row_schema import RequestDivergence, RequestRow, RoundRow
from spec_lab.record.schema import Rows, Status, Summary
from spec_lab.record.sinks import CONFIG_FILE, SUMMARY_FILE, FileSink, Sink, write_config, write_json
from spec_lab.record.summary import build_summary

if TYPE_CHECKING:
    from spec_lab.core.results import RequestRecord, RoundRecord

DIGITS = 5
"""Number of decimals of a confidence in a record."""
LOADING = "it was killed while its models were loaded"
STILL_RUNNING = "it still runs, or was killed before its end"
NOT_ENDED = (LOADING, STILL_RUNNING)
"""Reasons in the record of a run that has not ended, or was killed."""


class Recorder:
    """Records one run into its folder: `with Recorder(folder, info) as recorder: ...; recorder.finish(summary)`.

    A provisional `summary.json` with status `interrupted` is written at once, so that a killed process leaves a valid
    record. An exception changes it to `failed`, and Ctrl-C to `interrupted`, each with a reason; both are raised again.
    Files are the first sink, so that errors of other sinks cannot lose them.

    Args:
        sinks: further sinks, such as `WandbSink`.
        metrics: metrics of extensions, whose numbers for a round are written in its line.
    """

    def __init__(
        self, folder: Path, info: RunInfo, sinks: Sequence[Sink] = (), metrics: OwnMetrics | None = None
    ) -> None:
        self.folder = folder
        self._metrics = metrics or OwnMetrics()
        self._info = info
        self._files = FileSink()
        self._sinks: list[Sink] = [self._files, *sinks]
        self._started: list[Sink] = []
        self._started_at = time.perf_counter()
        self._is_finished = False

    @property
    def seconds(self) -> float:
        """Return the wall time since the recorder was made, for `build_summary`."""
        return time.perf_counter() - self._started_at

    def __enter__(self) -> Recorder:
        provisional = self._without_results("interrupted", STILL_RUNNING)
        try:
            for sink in self._sinks:
                sink.start(self.folder, provisional)
                self._started.append(sink)
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            assert self._is_finished, "the runner left without recorder.finish(summary)"
        elif not self._is_finished:
            self._give_up(error)

    def rounds(self, repeat: int, records: Sequence[RoundRecord]) -> None:
        """Record the rounds of one timed repeat of the main configuration."""
        for record in records:
            row = round_row(repeat, record, self._metrics.of_round(record))
            for sink in self._started:
                sink.round(row)

    def decoded(self, record: RequestRecord) -> None:
        """Write the line of a request that has just ended, without its text and the results of checks."""
        self._files.request(request_row(record, "", None, None))

    def requests(self, rows: Iterable[RequestRow]) -> None:
        """Record the finished requests of the first repeat, in place of the lines of `decoded`; see `request_row`."""
        with self._files.requests_anew():
            for row in rows:
                self.request(row)

    def request(self, row: RequestRow) -> None:
        """Record a finished request; `row` is made by `request_row`."""
        for sink in self._started:
            sink.request(row)

    def finish(self, summary: Summary) -> None:
        """Write the final record, once. When its files are written, the run has ended, whatever other sinks do."""
        assert not self._is_finished, "a run ends once"
        for sink in self._started:
            sink.finish(summary)
            self._is_finished = True

    def _give_up(self, error: BaseException) -> None:
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        ended = "KeyboardInterrupt", *getattr(error, "__notes__", ())
        reason = "; ".join(ended) if status == "interrupted" else describe_error(error)
        self.finish(self._without_results(status, reason))

    def _without_results(self, status: Status, reason: str) -> Summary:
        return build_summary(self._info, Measured(), seconds=self.seconds, status=status, reason=reason)


def write_status(folder: Path, info: RunInfo, status: Status, reason: str) -> Summary:
    """Record a run that has not begun, such as a refused one: write `summary.json` and `config.yaml`, nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = build_summary(info, Measured(), seconds=0.0, status=status, reason=reason)
    write_config(folder / CONFIG_FILE, info.config)
    write_json(folder / SUMMARY_FILE, summary)
    return summary


def utc_now() -> str:
    """Return the current time in the format of `RunInfo.started_at`."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def request_row(
    record: RequestRecord,
    text: str,
    correct: bool | None,
    divergence: Divergence | None,
    num_thinking_tokens: int | None = None,
    text_ends: Sequence[int] | None = None,
    checker: str | None = None,
    answer_read: str | None = None,
) -> RequestRow:
    """Make the line of `requests.jsonl` for a request, with its decoded output and the results of the checks."""
    return RequestRow(
        id=record.request_id,
        category=record.category,
        prompt_ids=list(record.prompt_ids),
        output_ids=list(record.output_ids),
        text=text,
        offered_per_round=list(record.offered_per_round),
        confidence_per_round=_rounded(record.confidence_per_round),
        accepted_per_round=list(record.accepted_per_round),
        judged_per_round=list(record.judged_per_round),
        emitted_per_round=list(record.emitted_per_round),
        truncated=record.truncated,
        finish_reason=record.finish_reason.value,
        admitted_at=record.admitted_at,
        emitted_at=list(record.emitted_at),
        answer=record.answer,
        correct=correct,
        checker=checker,
        answer_read=answer_read,
        divergence=None
        if divergence is None
        else RequestDivergence(index=divergence.index, margin=divergence.margin, kind=divergence.kind),
        num_thinking_tokens=num_thinking_tokens,
        drafted_by=list(record.drafted_by) or None,
        token_origins=record.token_origins,
        text_ends=None if text_ends is None else list(text_ends),
    )


def round_row(repeat: int, record: RoundRecord, metrics: dict[str, float | None] | None = None) -> RoundRow:
    """Make the line of `rounds.jsonl` for a round, with the numbers of extensions' metrics."""
    return RoundRow(
        repeat=repeat,
        index=record.index,
        request_ids=record.request_ids,
        accepted=record.accepted,
        emitted=record.emitted,
        truncated=record.truncated,
        seconds=record.seconds,
        stage_seconds=record.stage_seconds,
        rows=cast(Rows, asdict(record.rows)),
        relaxed=record.relaxed,
        launch_seconds=record.launch_seconds,
        num_surplus=record.num_surplus,
        distance=None if record.distance is None else [_finite(apart) for apart in record.distance],
        metrics=metrics or {},
    )


def _rounded(confidences: list[list[float]]) -> list[list[float]] | None:
    """Return confidences rounded to `DIGITS` decimals; None if none were stored."""
    noted = [[round(number, DIGITS) for number in numbers] for numbers in confidences]
    return noted if any(noted) else None


def _finite(numbers: list[float]) -> list[float | None]:
    """Replace infinity by None, since JSON does not have it. KL is infinite if a token can be drawn to which the target
    gives no probability."""
    return [number if math.isfinite(number) else None for number in numbers]
