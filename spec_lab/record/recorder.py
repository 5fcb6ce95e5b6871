"""Writes a run's record, which is valid at all times, and sends the same to further sinks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from spec_lab.core.errors import describe_error
from spec_lab.record.names import CONFIG_FILE, REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE, Status

if TYPE_CHECKING:
    from spec_lab.core.results import RequestRecord, RoundRecord
    from spec_lab.record.metric import Metric
    from spec_lab.record.models import Model, Request, Round, Run

LOADING = "it was killed while its models were loaded"
STILL_RUNNING = "it still runs, or was killed before its end"
NOT_ENDED = (LOADING, STILL_RUNNING)
"""Reasons in the record of a run that has not ended, or was killed."""
DIGITS = 5
"""Decimals of a confidence in a record."""


class Sink(Protocol):
    """Receives one run's record. `start` is called first, before there are results, and `finish` last, even if the run
    failed."""

    def start(self, folder: Path, run: Run) -> None: ...

    def round(self, row: Round) -> None: ...

    def request(self, row: Request) -> None: ...

    def finish(self, run: Run) -> None: ...


class FileSink:
    """Writes `summary.json`, `config.yaml`, and a line for each request and round.

    `summary.json` says `interrupted` from the start, so that a killed run has the right status. A kill can cut off the
    last line of a JSON Lines file, but no earlier line.
    """

    def start(self, folder: Path, run: Run) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        write_run(folder, run)
        self._requests: BinaryIO = (folder / REQUESTS_FILE).open("wb", buffering=0)
        self._rounds: BinaryIO = (folder / ROUNDS_FILE).open("wb", buffering=0)

    def round(self, row: Round) -> None:
        self._rounds.write(_line(row))

    def request(self, row: Request) -> None:
        self._requests.write(_line(row))

    def finish(self, run: Run) -> None:
        self._requests.close()
        self._rounds.close()
        write_run(self._folder, run)


class Recorder:
    """Records one run into its folder: `with Recorder(folder, run) as recorder: ...; recorder.finish(run)`.

    An exception makes the record `failed`, and Ctrl-C `interrupted`, each with a reason; both are raised again. Files
    are the first sink, so that errors of other sinks cannot lose them.

    Args:
        run: what is known of the run before it decodes.
    """

    def __init__(self, folder: Path, run: Run, sinks: Sequence[Sink] = ()) -> None:
        self.folder = folder
        self._begun = run
        self._files = FileSink()
        self._sinks: list[Sink] = [self._files, *sinks]
        self._started: list[Sink] = []
        self._started_at = perf_counter()
        self._is_finished = False

    @property
    def seconds(self) -> float:
        """Return the wall time since the recorder was made."""
        return perf_counter() - self._started_at

    def __enter__(self) -> Recorder:
        begun = ended(self._begun, "interrupted", STILL_RUNNING)
        try:
            for sink in self._sinks:
                sink.start(self.folder, begun)
                self._started.append(sink)
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            assert self._is_finished, "the runner left without recorder.finish(run)"
        elif not self._is_finished:
            self._give_up(error)

    def rounds(self, repeat: int, records: Iterable[RoundRecord], metrics: Sequence[Metric] = ()) -> None:
        """Record the rounds of one timed repeat of the main configuration."""
        for record in records:
            row = round_row(repeat, record, metrics)
            for sink in self._started:
                sink.round(row)

    def decoded(self, record: RequestRecord) -> None:
        """Write the line of a request that has just ended, without its text and the results of checks."""
        self._files.request(request_row(record))

    def requests(self, rows: Sequence[Request]) -> None:
        """Record the requests of the first repeat, in place of the lines of `decoded`."""
        replace_bytes(self.folder / REQUESTS_FILE, b"".join(map(_line, rows)))
        for sink in self._started[1:]:
            for row in rows:
                sink.request(row)

    def finish(self, run: Run) -> None:
        """Write the final record, once. When its files are written, the run has ended, whatever other sinks do."""
        assert not self._is_finished, "a run ends once"
        for sink in self._started:
            sink.finish(run)
            self._is_finished = True

    def _give_up(self, error: BaseException) -> None:
        self.finish(ended(self._begun, *ending(error), self.seconds))


def begun(
    config: dict[str, Any], choices: dict[str, str], extensions: Mapping[str, dict[str, str | None]] | None = None
) -> Run:
    """Return the record of a run that begins, and of which nothing is loaded yet."""
    from spec_lab.core.version import VERSION
    from spec_lab.record.models import Run
    from spec_lab.record.provenance import machine_of

    return Run(
        status="interrupted",
        reason=STILL_RUNNING,
        name=config["name"],
        choices=choices,
        config=config,
        started_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        engine_version=VERSION,
        machine=machine_of(extensions=extensions or {}),
    )


def ending(error: BaseException) -> tuple[Status, str]:
    """Return how a run ended by this error, and why."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "failed", describe_error(error)


def ended(run: Run, status: Status, reason: str, seconds: float = 0.0) -> Run:
    """Return the record of a run that ended so, without results."""
    from spec_lab.record.verdict import verdict

    found = run.model_copy(update={"status": status, "reason": reason, "seconds": seconds})
    return found.model_copy(update={"verdict": verdict(found)})


def write_run(folder: Path, run: Run) -> None:
    """Write the record and its configuration, also of a run that has not begun, such as a refused one."""
    from omegaconf import OmegaConf

    folder.mkdir(parents=True, exist_ok=True)
    replace_bytes(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(dict(run.config))).encode())
    replace_bytes(folder / SUMMARY_FILE, f"{run.model_dump_json(indent=1)}\n".encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file so that the old one stays complete until the new one is complete, even if the process is killed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def request_row(record: RequestRecord, **found: Any) -> Request:
    """Make the record of a request from the engine's, and what was `found` out about its output."""
    from spec_lab.record.models import Request

    told = {name: getattr(record, name) for name in Request.model_fields if hasattr(record, name)}
    sure = [[round(number, DIGITS) for number in numbers] for numbers in record.confidence_per_round]
    none_if_empty = {"drafted_by": record.drafted_by or None, "confidence_per_round": sure if any(sure) else None}
    ending = record.finish_reason.value
    return Request(**{**told, "id": record.request_id, "finish_reason": ending, **none_if_empty, **found})


def round_row(repeat: int, record: RoundRecord, metrics: Sequence[Metric] = ()) -> Round:
    """Make the record of a round from the engine's, with the numbers of extensions' metrics."""
    from spec_lab.record.metric import round_numbers
    from spec_lab.record.models import Round

    fields = {name: getattr(record, name) for name in Round.model_fields if name not in ("repeat", "metrics")}
    return Round(repeat=repeat, metrics=round_numbers(record, metrics), **fields)


def _line(row: Model) -> bytes:
    return f"{row.model_dump_json()}\n".encode()
