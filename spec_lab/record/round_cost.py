"""This module puts what a round costs in steps of plain decoding."""

from __future__ import annotations

from spec_lab.record.schema import Summary
from spec_lab.record.time_metrics import DRAFT_STAGES


def draft_ms(summary: Summary) -> float | None:
    """Return the time of the drafter in a round; None where no stage of it could be timed by itself."""
    stages = summary["stage_ms_per_round"]
    known = [value for stage in DRAFT_STAGES if (value := stages.get(stage)) is not None]
    return sum(known) if known else None


def in_plain_steps(summary: Summary, milliseconds: float | None) -> float | None:
    """Return a part of a round's time in plain steps; None without plain decoding beside the run.

    A round serves a batch: its parts share the cost of a request round as they share its time.
    """
    break_even, round_ms = summary["break_even_acceptance_length"], summary["round_ms"]
    return milliseconds * break_even / round_ms if milliseconds is not None and break_even and round_ms else None
