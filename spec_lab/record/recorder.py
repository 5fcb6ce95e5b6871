"""Writes a run's record, which is valid at all times, and sends the same to further sinks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from spec_lab.core.errors import UserError, describe_error
from spec_lab.record.names import CONFIG_FILE, REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE, Status

if TYPE_CHECKING:
    from spec_lab.core.results import RequestRecord, RoundRecord
    from spec_lab.record.models import Model, Request, Run

STILL_RUNNING = "it still runs, or was killed before its end"
DIGITS = 5
"""Decimals of a confidence in a record."""


class Sink(Protocol):
    """Receives one run's record, whose requests and rounds lie in `folder`. `start` is called before there are results,
    and `finish` when the files are complete, even if the run failed."""

    def start(self, folder: Path, run: Run) -> None: ...

    def finish(self, run: Run) -> None: ...


class Recorder:
    """Writes `summary.json`, `config.yaml`, and a line for each request and round: `with Recorder.open(folder, run,
    sinks) as recorder: ...; recorder.finish(run)`.

    `summary.json` says `interrupted` from the start, so that a killed run has the right status. A kill can cut off the
    last line of a JSON Lines file, but no earlier line.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        write_run(folder, run)
        self.folder = folder
        self._requests = (folder / REQUESTS_FILE).open("wb", buffering=0)
        self._rounds = (folder / ROUNDS_FILE).open("wb", buffering=0)
        self._sinks: list[Sink] = []
        self._started_at = perf_counter()
        self._is_finished = False

    @classmethod
    @contextmanager
    def open(cls, folder: Path, run: Run, sinks: Sequence[Sink] = ()) -> Iterator[Recorder]:
        """Record a run of which `run` is known before it decodes.

        An exception makes the record `failed`, a `UserError` `refused`, and Ctrl-C `interrupted`, each with a reason.
        All are raised again.
        """
        recorder = cls(folder, run)
        try:
            for sink in sinks:
                sink.start(folder, run)
                recorder._sinks.append(sink)
            yield recorder
        except BaseException as error:
            if not recorder._is_finished:
                recorder.finish(ended(run, *ending(error), seconds=recorder.seconds))
            raise
        assert recorder._is_finished, "the runner left without recorder.finish(run)"

    @property
    def seconds(self) -> float:
        """Return the wall time since the recorder was made."""
        return perf_counter() - self._started_at

    def rounds(self, repeat: int, records: Iterable[RoundRecord]) -> None:
        """Record the rounds of one timed repeat of the main configuration."""
        from spec_lab.record.metric import numbers_of
        from spec_lab.record.models import Round

        for record in records:
            self._rounds.write(_line(Round(repeat=repeat, metrics=numbers_of("round", record), **_told(record, Round))))

    def decoded(self, record: RequestRecord) -> None:
        """Write the line of a request that has just ended, without its text and the results of checks."""
        self._requests.write(_line(request_row(record)))

    def requests(self, rows: Iterable[Request]) -> None:
        """Record the requests of the first repeat, in place of the lines of `decoded`."""
        replace_bytes(self.folder / REQUESTS_FILE, b"".join(map(_line, rows)))

    def finish(self, run: Run) -> None:
        """Write the final record, once. When its files are written, the run has ended, whatever other sinks do."""
        assert not self._is_finished, "a run ends once"
        self._requests.close()
        self._rounds.close()
        write_run(self.folder, run)
        self._is_finished = True
        for sink in self._sinks:
            sink.finish(run)


def begun(config: dict[str, Any], choices: dict[str, str], **found: Any) -> Run:
    """Return the record of a run that begins, with what was `found` out before it decodes."""
    from spec_lab.core.version import VERSION
    from spec_lab.record.models import Run

    run = Run(
        status="interrupted",
        name=config["name"],
        choices=choices,
        config=config,
        started_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        engine_version=VERSION,
    )
    return ended(run, "interrupted", STILL_RUNNING, **found)


def ending(error: BaseException) -> tuple[Status, str]:
    """Return how a run ended by this error, and why."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    if isinstance(error, UserError):
        return "refused", str(error)
    return "failed", describe_error(error)


def ended(run: Run, status: Status, reason: str | None = None, **found: Any) -> Run:
    """Return the record of a run that ended so, with further fields that were `found`."""
    from spec_lab.record.verdict import verdict

    run = run.model_copy(update={"status": status, "reason": reason, **found})
    return run.model_copy(update={"verdict": verdict(run)})


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

    sure = [[round(number, DIGITS) for number in numbers] for numbers in record.confidence_per_round]
    none_if_empty = {"drafted_by": record.drafted_by or None, "confidence_per_round": sure if any(sure) else None}
    renamed = {"id": record.request_id, "finish_reason": record.finish_reason.value}
    return Request(**{**_told(record, Request), **renamed, **none_if_empty, **found})


def _told(record: RequestRecord | RoundRecord, row: type[Model]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in row.model_fields if hasattr(record, name)}


def _line(row: Model) -> bytes:
    return f"{row.model_dump_json()}\n".encode()
