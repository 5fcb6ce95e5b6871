"""The findings of checks, the faults among them, and both as text."""

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


def format_findings(findings: Sequence[Finding]) -> str:
    """Write the findings as a table, in the order of the checks, with a summary below."""
    width, verdict_width = (max(map(len, names)) for names in ([each.check for each in findings], Verdict))
    lines = [f"{each.check:{width}}  {each.verdict:{verdict_width}}  {each.measured}" for each in findings]
    return "\n".join([*lines, "", summarize(findings)])


def summarize(findings: Sequence[Finding]) -> str:
    """Return a line with the first fault, which is the likeliest because of the order of the checks.

    If there is none it says so, and how many checks did not apply, so that a drafter is not considered healthy if
    little could be checked.
    """
    if found := faults(findings):
        others = f" (also: {', '.join(finding.check for finding in found[1:])})" if len(found) > 1 else ""
        return f"most likely fault: {found[0].check}: {found[0].cause}{others}"
    suspicious = [finding.check for finding in findings if finding.verdict is Verdict.SUSPICIOUS]
    look = f"; worth a look: {', '.join(suspicious)}" if suspicious else ""
    count = sum(finding.verdict is Verdict.DOES_NOT_APPLY for finding in findings)
    return f"no fault found{look}; checks that do not apply: {count}"
