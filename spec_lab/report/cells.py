"""Writes a record's ratios, intervals and accuracies as the cells of a table."""

from __future__ import annotations

from spec_lab.record.paired import PairedRatio
from spec_lab.record.schema import Accuracy
from spec_lab.record.wording import ABSENT, percent, with_range
from spec_lab.report.bootstrap import Interval


def ratio_cell(ratio: PairedRatio | None) -> str:
    """Write a ratio, with its 95 % interval over turns if there were enough of them."""
    return ABSENT if ratio is None else with_range(ratio.value, *ratio.ends)


def interval_cell(interval: Interval | None) -> str:
    """Write the value with the ends of its interval."""
    return ABSENT if interval is None else with_range(interval.value, interval.low, interval.high)


def accuracy_cell(accuracy: Accuracy) -> str:
    """Write the share of correct answers with the ends of its interval."""
    if accuracy["value"] is None:
        return ABSENT
    return f"{percent(accuracy['value'])} ({percent(accuracy['low'])} to {percent(accuracy['high'])})"
