"""Records of an older layout, brought into the one that `spec_lab/record/schema.py` describes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from spec_lab.record.schema import SCHEMA_VERSION, RequestRow, Speed, Summary

READABLE_VERSIONS = (2, SCHEMA_VERSION)
SINCE_JUDGED_ROUNDS = 3
"""The first version whose acceptance length counts rounds cut short."""


def upgraded_summary(summary: Summary) -> Summary:
    """A summary of any readable version with all keys of today's; `schema_version` and the numbers stay as recorded."""
    speeds: list[Speed] = [summary, *summary["references"].values()]
    for speed in speeds:
        speed["stage_ms_per_round"].setdefault("readback", None)
    return summary


def upgraded_request(row: RequestRow) -> RequestRow:
    """A line of `requests.jsonl` with `judged_per_round`, which follows from how its last round was cut.

    One thing of version 2 is lost: an end of sequence among the tokens that a limit cut off.
    """
    judged = [accepted + 1 for accepted in row["accepted_per_round"]]
    if judged and row["truncated"] and row["finish_reason"] == "eos":
        judged[-1] = row["emitted_per_round"][-1]
    return cast(RequestRow, {"judged_per_round": judged, **row})


def old_definition(summaries: Iterable[Summary]) -> str:
    """The note under a table with acceptance lengths that are not defined as today's are; empty where all are."""
    if all(summary["schema_version"] >= SINCE_JUDGED_ROUNDS for summary in summaries):
        return ""
    return (
        "schema version 2 left the rounds cut short out of the acceptance length, which is biased low, most with long "
        "drafts and short outputs; run again to compare with newer runs"
    )
