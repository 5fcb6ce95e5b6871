"""The findings as text: a line for each check, then a summary."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.doctor.findings import Finding, Verdict, faults


def format_findings(findings: Sequence[Finding]) -> str:
    """Write the findings as a table, in the order of the checks, with a summary below."""
    width = max(len(finding.check) for finding in findings)
    verdict_width = max(len(verdict) for verdict in Verdict)
    lines = [f"{f.check:{width}}  {f.verdict:{verdict_width}}  {f.measured}" for f in findings]
    return "\n".join([*lines, "", summarize(findings)])


def summarize(findings: Sequence[Finding]) -> str:
    """Return a line with the first fault, or one that says that there is none. The first is the likeliest, because of
    the order of the checks."""
    found = faults(findings)
    if found:
        others = f" (also: {', '.join(finding.check for finding in found[1:])})" if len(found) > 1 else ""
        return f"most likely fault: {found[0].check}: {found[0].cause}{others}"
    suspicious = [finding.check for finding in findings if finding.verdict is Verdict.SUSPICIOUS]
    look = f"; worth a look: {', '.join(suspicious)}" if suspicious else ""
    return f"no fault found{look}{_left_out(findings)}"


def _left_out(findings: Sequence[Finding]) -> str:
    """Say how many checks did not apply, so that a drafter is not considered healthy if little could be checked. Empty
    if all applied."""
    count = sum(finding.verdict is Verdict.DOES_NOT_APPLY for finding in findings)
    if not count:
        return ""
    return f"; {count} check{'s do' if count > 1 else ' does'} not apply"
