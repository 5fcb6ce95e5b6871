"""Finds recorded runs: as plain summaries, or as pandas frames for notebooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_lab.core.errors import UserError
from spec_lab.record.reading import read_request_rows, read_round_rows, read_summary
from spec_lab.record.schema import THIS_RUN, Summary
from spec_lab.record.sinks import SUMMARY_FILE
from spec_lab.record.time_metrics import STAGES

if TYPE_CHECKING:
    import pandas as pd


class Run(NamedTuple):
    """A recorded run: its folder and its record."""

    folder: Path
    summary: Summary


class Found(NamedTuple):
    """Runs, oldest first, and the file and the reason for each record that cannot be read."""

    runs: list[Run]
    unreadable: list[str]


def search_runs(folders: Iterable[Path]) -> Found:
    """Find the runs in the folders and below them (`run_folders`), even if some cannot be read.

    Raises:
        UserError: a folder is missing or has no run.
    """
    found: dict[Path, Run] = {}
    unreadable: dict[Path, str] = {}
    for folder in folders:
        inside = list(run_folders(folder))
        if not inside:
            raise UserError(
                f"{folder}: it has no {SUMMARY_FILE}, nor has any folder in it; name a run, or a folder of runs"
            )
        for path in inside:
            try:
                found[path.resolve()] = Run(path, read_summary(path))
            except UserError as error:
                unreadable[path.resolve()] = str(error)
    runs = sorted(found.values(), key=lambda run: run.summary["started_at"])
    return Found(runs, list(unreadable.values()))


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Find the same runs as `search_runs`, for notebooks: runs that cannot be read are left out with a warning."""
    found = search_runs(folders)
    for reason in found.unreadable:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return found.runs


def newest_run(folder: Path, finished: bool = True) -> Run:
    """Find the run started last in `folder` or below, by default among the finished ones."""
    runs = [run for run in find_runs([folder]) if not finished or run.summary["status"] == "finished"]
    if not runs:
        kind = "finished run" if finished else "run that can be read"
        raise UserError(f"{folder}: it has no {kind}; make one with python -m spec_lab")
    return runs[-1]


def load_runs(folders: Path | Sequence[Path]) -> pd.DataFrame:
    """Return one row for each run, oldest first, with its choices, knobs and numbers in flat columns."""
    import pandas as pd

    folders = [folders] if isinstance(folders, Path) else folders
    return pd.DataFrame([_run_row(run) for run in find_runs(folders)])


def folder_of(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a notebook passed; UserError if it is not a path."""
    try:
        path = Path(folder)
        if "\0" in str(path):
            raise ValueError("no system can have such a path")
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder!r} is not the folder of a run; use its path") from error
    return path


def load_requests(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Return `requests.jsonl` of one run, with a row for each request and further columns: its rounds, emitted tokens a
    round, and number of output tokens."""
    import pandas as pd

    frame = pd.DataFrame(read_request_rows(folder_of(folder)))
    if not frame.empty:
        frame["rounds"] = frame["emitted_per_round"].map(len)
        frame["acceptance_length_all"] = frame["emitted_per_round"].map(sum) / frame["rounds"].where(
            frame["rounds"] > 0
        )
        frame["num_output_tokens"] = frame["output_ids"].map(len)
    return frame


def load_rounds(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Return `rounds.jsonl` of one run, with a row for each round and a column for each stage's milliseconds."""
    import pandas as pd

    lines = []
    for row in read_round_rows(folder_of(folder)):
        stages = {f"{stage}_ms": 1e3 * seconds for stage, seconds in row["stage_seconds"].items()}
        lines.append({**row, **row["rows"], "round_ms": 1e3 * row["seconds"], **stages})
    return pd.DataFrame(lines).drop(columns=["rows", "stage_seconds"], errors="ignore")


def load_categories(summary: Summary) -> pd.DataFrame:
    """Return one row for each category of a run, that with the lowest acceptance length first."""
    import pandas as pd

    rows = [
        {
            "category": category,
            "num_requests": outcome["num_requests"],
            "rounds": outcome["rounds"],
            "acceptance_length": outcome["acceptance_length"],
            **{f"accuracy_{key}": value for key, value in outcome["accuracy"].items()},
        }
        for category, outcome in summary["by_category"].items()
    ]
    return pd.DataFrame(rows).sort_values("acceptance_length", ignore_index=True) if rows else pd.DataFrame()


def load_positions(summary: Summary) -> pd.DataFrame:
    """Return acceptance rates in long form: by category (`all` for the whole run), position (from 1) and kind."""
    import pandas as pd

    outcomes = {"all": summary["acceptance_rate_by_position"]} | {
        category: outcome["acceptance_rate_by_position"] for category, outcome in summary["by_category"].items()
    }
    return pd.DataFrame(
        [
            {"category": category, "position": position, "kind": kind, "rate": rate}
            for category, rates in outcomes.items()
            for kind in ("unconditional", "conditional")
            for position, rate in enumerate(rates[kind], start=1)
        ],
        columns=["category", "position", "kind", "rate"],
    )


def load_configurations(summary: Summary) -> pd.DataFrame:
    """Return stage times, rows and rates, with one row for each configuration: the run first, then its references."""
    import pandas as pd

    configurations: dict[str, Any] = {THIS_RUN: summary, **summary["references"]}
    return pd.DataFrame(
        [
            {
                "configuration": name,
                "decode_tokens_per_second": speed["decode_tokens_per_second"],
                "round_ms": speed["round_ms"],
                **{f"{stage}_ms": speed["stage_ms_per_round"].get(stage) for stage in STAGES},
                **speed["rows"],
            }
            for name, speed in configurations.items()
        ]
    )


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield folders with a record, in the order of their paths. Folders below one are not searched, since they may have
    copies."""
    for place, folders, files in os.walk(folder):
        if SUMMARY_FILE in files:
            folders.clear()
            yield Path(place)
        folders.sort()


def _run_row(run: Run) -> dict[str, Any]:
    summary = run.summary
    speedup: Any = summary["speedup"] or {}
    pruning: Any = summary["pruning_speedup"] or {}
    latencies: Mapping[str, Any] = summary["latency_ms"]
    plain_keys = (
        "name", "status", "reason", "started_at", "seconds", "git_revision", "device", "device_name", "dtype",
        "num_draft_tokens", "num_requests", "acceptance_length", "acceptance_length_all", "acceptance_imposed",
        "rounds", "emitted_tokens", "output_tokens", "decode_tokens_per_second", "end_to_end_tokens_per_second",
        "break_even_acceptance_length", "round_ms", "prefill_ms_per_request",
    )  # fmt: skip
    return {
        "folder": str(run.folder),
        **summary["choices"],
        **{key: summary[key] for key in plain_keys},  # type: ignore[literal-required]
        "batch_size": summary["config"].get("batch_size"),
        "seed": summary["config"].get("seed"),
        **{f"speedup_{key}": speedup.get(key) for key in ("value", "low", "high")},
        **{f"pruning_speedup_{key}": pruning.get(key) for key in ("value", "low", "high")},
        **{f"{stage}_ms": summary["stage_ms_per_round"].get(stage) for stage in STAGES},
        **{f"{key}_p50_ms": value["p50"] for key, value in latencies.items()},
        **{f"accuracy_{key}": value for key, value in summary["accuracy"].items()},
        **summary["rows"],
    }
