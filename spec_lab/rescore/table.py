"""The table of acceptance lengths of several rules on one recorded trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from spec_lab.record.wording import ABSENT, number
from spec_lab.report.table import format_table, paragraph

NOTE = """\
Acceptance length as judged: accepted drafts a round, plus one, over all recorded rounds, before any cut by end of
sequence or a limit. Every rule judges the drafts of the text that the run wrote. This is exact for the run's own rule.
For another rule it is only a comparison, since that rule's text may differ."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The drafts that one rule accepts: those of each round, by request id."""

    rule: str
    accepted: Mapping[str, Sequence[int]]


def format_judgements(own: Judgement, others: Sequence[Judgement], categories: Mapping[str, str]) -> str:
    """Write the table, the run's own rule first; `categories` has the category of each request id."""
    names = sorted({categories[request_id] for request_id in own.accepted})
    header = ["rule", "acceptance length", "change", "change %", *names]
    body = [
        [judgement.rule, *_lengths(judgement, own), *_by_category(judgement, names, categories)]
        for judgement in (own, *others)
    ]
    num_rounds = sum(map(len, own.accepted.values()))
    count = f"{num_rounds:,} rounds of {len(own.accepted):,} requests."
    return "\n\n".join([format_table(header, body, left=("rule",)), count, paragraph(NOTE)])


def _lengths(judgement: Judgement, own: Judgement) -> list[str]:
    """Return acceptance length, and its change against the run's own rule."""
    length, base = _length(judgement.accepted.values()), _length(own.accepted.values())
    if length is None or base is None:
        return [ABSENT] * 3
    change = [ABSENT] * 2 if judgement is own else [f"{length - base:+.3f}", f"{100 * (length / base - 1):+.1f}"]
    return [number(length, 3), *change]


def _by_category(judgement: Judgement, names: Iterable[str], categories: Mapping[str, str]) -> list[str]:
    return [
        number(_length(rounds for key, rounds in judgement.accepted.items() if categories[key] == name), 3)
        for name in names
    ]


def _length(accepted: Iterable[Sequence[int]]) -> float | None:
    counts = [count for rounds in accepted for count in rounds]
    return fmean(counts) + 1 if counts else None
