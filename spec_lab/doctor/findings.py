"""The findings of checks, and the faults among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict of a check. Suspicious is worth a look but not a fault, and does not change the exit code."""

    OK = "ok"
    SUSPICIOUS = "suspicious"
    FAULT = "fault"
    DOES_NOT_APPLY = "does not apply"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: name of the check.
        measured: the numbers, or why there is nothing to measure.
        cause: what is wrong, and often what to do about it; None if no cause was found.
    """

    check: str
    verdict: Verdict
    measured: str
    cause: str | None = None


def does_not_apply(check: str, reason: str) -> Finding:
    """Return the finding of a check that does not apply to this run."""
    return Finding(check, Verdict.DOES_NOT_APPLY, reason)


def faults(findings: Sequence[Finding]) -> list[Finding]:
    """Return the faults in the order of the checks. The first of them may explain the others."""
    return [finding for finding in findings if finding.verdict is Verdict.FAULT]
