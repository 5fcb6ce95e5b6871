"""Converts records of older layouts into the one in `spec_lab/record/schema.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from spec_lab.record.row_schema import RequestRow
from spec_lab.record.schema import SCHEMA_VERSION, Speed, Summary

READABLE_VERSIONS = (1, 2, 3, 4, 5, 6, SCHEMA_VERSION)
SINCE_JUDGED_ROUNDS = 3
"""The first version whose acceptance length counts rounds cut short."""


UNKNOWN_WORK = ("launches_per_round", "replays_per_round", "host_syncs_per_round", "gpu_busy_ms_per_round")


def completed_version_1(value: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of version 2 to a record of version 1, with unknown values, before it is checked."""
    references = value.get("references")
    speeds = [value, *(references.values() if isinstance(references, dict) else [])]
    for speed in speeds:
        if isinstance(speed, dict):
            speed.setdefault("launch_ms", None)
            if isinstance(speed.get("graph"), dict):
                speed["graph"].setdefault("nodes", {})
    return {**dict.fromkeys((*UNKNOWN_WORK, "gpu_idle_share")), **value}


def upgraded_summary(summary: Summary) -> Summary:
    """Add keys that older records may lack, with values that mean unknown or none, and return the summary;
    `schema_version` and the numbers stay as recorded."""
    speeds: list[Speed] = [summary, *summary["references"].values()]
    for speed in speeds:
        speed["stage_ms_per_round"].setdefault("readback", None)
        speed["stage_ms_per_round"].setdefault("lookup", None)
        speed.setdefault("experts_read", None)
        speed.setdefault("expert_bytes_read", None)
        speed.setdefault("wasted_rounds", 0)
        speed.setdefault("metrics", {})
        speed["graph"].setdefault("rounds_per_replay", 1)
    summary.setdefault("row_invariant", None)
    summary.setdefault("weight_dtype", None)
    summary.setdefault("stored_types", None)
    summary.setdefault("template", None)
    summary.setdefault("target_digest", None)
    summary.setdefault("thinking_markers", None)
    summary.setdefault("memory", None)
    return summary


def upgraded_request(row: RequestRow) -> RequestRow:
    """Return a line of `requests.jsonl` with all keys of the current version.

    If `judged_per_round` is missing, it follows from how the last round was cut. One thing is lost before version 3: an
    end of sequence among the tokens that a limit cut off. Origins of tokens are unknown before version 4. Before
    version 5 every round offered all its drafts, so `offered_per_round` is None.
    """
    judged = [accepted + 1 for accepted in row["accepted_per_round"]]
    if judged and row["truncated"] and row["finish_reason"] == "eos":
        judged[-1] = row["emitted_per_round"][-1]
    younger = ("offered_per_round", "confidence_per_round", "token_origins", "text_ends")
    unknown = dict.fromkeys((*younger, "checker", "answer_read", "drafted_by"))
    return cast(RequestRow, {"judged_per_round": judged, **unknown, **row})


def old_definition(summaries: Iterable[Summary]) -> str:
    """Return the note for a table with acceptance lengths that have an older definition; empty if there are none."""
    if all(summary["schema_version"] >= SINCE_JUDGED_ROUNDS for summary in summaries):
        return ""
    return (
        "schema versions 1 and 2 left the rounds cut short out of the acceptance length, which is biased low, most "
        "with long drafts and short outputs; run again to compare with newer runs"
    )
