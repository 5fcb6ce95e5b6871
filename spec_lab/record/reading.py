"""Reads the recorded files of one run and checks them. A refusal names the file and the reason.

Tables and plots read records through this module, so they need no checks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

from spec_lab.core.errors import UserError
from spec_lab.core.origins import TokenOrigin
from spec_lab.record.layout import misfit, parse_json
from spec_lab.record.possible import impossible_numbers, impossible_request, impossible_round
from spec_lab.record.row_schema import RequestRow, RoundRow
from spec_lab.record.schema import Outcome, RelaxedSettings, Settings, Summary
from spec_lab.record.sinks import REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE
from spec_lab.record.versions import READABLE_VERSIONS, completed_version_1, upgraded_request, upgraded_summary


def read_summary(folder: Path) -> Summary:
    """Read the record of the run in `folder`.

    Raises:
        UserError: the file is not the record of a run, is broken, or has a layout that this version does not read.
    """
    path = folder / SUMMARY_FILE
    try:
        value = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path}: {error.strerror}; name the folder of a run; a run prints it at its end") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not the record of a run ({error})") from error
    if not isinstance(value, dict) or "schema_version" not in value:
        raise UserError(f"{path}: not the record of a run (it has no schema_version)")
    if value["schema_version"] == 1:
        value = completed_version_1(value)
    summary = cast(Summary, value)
    problem = _version_problem(value["schema_version"]) or misfit(value, Summary) or _disagreement(summary)
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return upgraded_summary(summary)


def read_request_rows(folder: Path) -> list[RequestRow]:
    """Read the lines of `requests.jsonl` of one run.

    Raises:
        UserError: the file is missing or broken.
    """
    path = folder / REQUESTS_FILE
    rows: list[RequestRow] = list(_read_rows(path, RequestRow))
    for number, row in enumerate(rows, start=1):
        for key in ("emitted_per_round", "judged_per_round", "offered_per_round", "confidence_per_round"):
            counts: Any = row.get(key)
            if counts is not None and len(row["accepted_per_round"]) != len(counts):
                raise UserError(f"{path}, line {number}: accepted_per_round and {key} differ in length")
        for problem in chain(_token_problems(row), impossible_request(row)):
            raise UserError(f"{path}, line {number}: {problem}")
    return [upgraded_request(row) for row in rows]


def read_all_request_rows(folder: Path, summary: Summary) -> list[RequestRow]:
    """Read the lines of `requests.jsonl`. Check that there are as many as the run had requests, and that none accepted
    more than K drafts in a round.

    Raises:
        UserError: the file is missing or broken, or disagrees with the summary's number of requests or K.
    """
    rows = read_request_rows(folder)
    if len(rows) != summary["num_requests"]:
        path = folder / REQUESTS_FILE
        raise UserError(f"{path}: it has {len(rows)} requests, but the run had {summary['num_requests']}")
    num_draft_tokens = summary["num_draft_tokens"] or 0
    for row in rows:
        if max(row["accepted_per_round"], default=0) > num_draft_tokens:
            path = folder / REQUESTS_FILE
            raise UserError(f"{path}: request {row['id']} accepted more drafts in a round than its {num_draft_tokens}")
    return rows


def _token_problems(row: RequestRow) -> Iterator[str]:
    """Say where the per-token fields do not match the output tokens or the text, or hold an unknown letter."""
    num_tokens = len(row["output_ids"])
    origins, ends = row.get("token_origins"), row.get("text_ends")
    if origins is not None and len(origins) != num_tokens:
        yield f"token_origins has {len(origins)} letters for {num_tokens} output_ids"
    if origins is not None and (unknown := set(origins) - set(TokenOrigin)):
        yield f"token_origins has the letter {min(unknown)!r}, which is not an origin"
    if ends is not None and len(ends) != num_tokens:
        yield f"text_ends has {len(ends)} entries for {num_tokens} output_ids"
    if ends and (ends != sorted(ends) or ends[0] < 0 or ends[-1] != len(row["text"])):
        yield "text_ends does not rise from 0 to the end of text"


def read_round_rows(folder: Path) -> list[RoundRow]:
    """Read the lines of `rounds.jsonl` of one run.

    Raises:
        UserError: the file is missing or broken.
    """
    path = folder / ROUNDS_FILE
    rows: list[RoundRow] = list(_read_rows(path, RoundRow))
    for number, row in enumerate(rows, start=1):
        for problem in impossible_round(row):
            raise UserError(f"{path}, line {number}: {problem}")
    return rows


def _read_rows(path: Path, layout: Any) -> Iterator[Any]:
    """Read the lines of a file. A last line that is incomplete, after a kill or on a full disk, is dropped."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: missing; a run that never began has none; if a run was moved, name its folder"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    *whole, torn = lines
    for number, line in enumerate(whole, start=1):
        yield _read_row(line, layout, f"{path}, line {number}")
    if torn and _is_whole(torn):
        yield _read_row(torn, layout, f"{path}, line {len(lines)}")


def _is_whole(line: bytes) -> bool:
    """Return whether a line is complete JSON; an object that is cut short never parses."""
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def _read_row(line: bytes, layout: Any, place: str) -> Any:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: not valid JSON ({error})") from error
    problem = misfit(row, layout)
    if problem is not None:
        raise UserError(f"{place}: {problem}")
    return row


def _version_problem(version: Any) -> str | None:
    if isinstance(version, int) and version in READABLE_VERSIONS:
        return None
    known = " or ".join(map(str, READABLE_VERSIONS))
    is_newer = isinstance(version, int) and version > max(READABLE_VERSIONS)
    remedy = "; update spec_lab" if is_newer else ""
    return f"schema_version is {repr(version)[:20]}, but this spec_lab reads {known}{remedy}"


def _disagreement(summary: Summary) -> str | None:
    """Say what is wrong in a summary that fits the layout: settings, parts that contradict each other, or impossible
    numbers."""
    problems = chain(
        _setting_problems(summary["config"]),
        _repeat_problems(summary),
        _position_problems(summary),
        impossible_numbers(summary),
    )
    return next(problems, None)


def _setting_problems(config: Mapping[str, Any]) -> Iterator[str]:
    problem = misfit(config, Settings, "config")
    if problem is None and config.get("acceptance", {}).get("name") == "relaxed_thinking":
        problem = misfit(config["acceptance"], RelaxedSettings, "config.acceptance")
    if problem is not None:
        yield problem


def _repeat_problems(summary: Summary) -> Iterator[str]:
    num_repeats = len(summary["repeats"])
    for name, reference in summary["references"].items():
        if len(reference["repeats"]) != num_repeats:
            yield f"references.{name}.repeats has {len(reference['repeats'])} entries, repeats has {num_repeats}"


def _position_problems(summary: Summary) -> Iterator[str]:
    """Say where the number of rates differs from the number of draft positions. A run without results has no K and no
    rates."""
    outcomes: dict[str, Outcome] = {"": summary} | {
        f"by_category.{name}.": outcome for name, outcome in summary["by_category"].items()
    }
    for where, outcome in outcomes.items():
        for kind in ("unconditional", "conditional"):
            num_rates = len(outcome["acceptance_rate_by_position"][kind])
            if num_rates != (summary["num_draft_tokens"] or 0):
                yield (
                    f"{where}acceptance_rate_by_position.{kind} has {num_rates} entries, "
                    f"num_draft_tokens is {summary['num_draft_tokens']}"
                )
