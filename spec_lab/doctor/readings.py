"""Other readings of the same checkpoint, scored by their drafts under teacher forcing.

A config.json may not state a choice, or state it in a way that engines read differently. A wrong reading lowers
acceptance without an error. So each such choice is also made the other way, in memory, over the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from spec_lab.doctor.aspects import Aspect
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.teacher_forced import Drafted

# Another reading must be better by this many accepted drafts a round, else it is not worth a change. The difference
# must also be this many standard errors, which happens by chance once in about 700 readings.
MIN_GAIN = 0.1
MIN_STANDARD_ERRORS = 3.0


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of a reading over the configured one, in accepted drafts a round and in standard errors."""

    mean: float
    standard_errors: float

    @property
    def is_clear(self) -> bool:
        return self.mean >= MIN_GAIN and self.standard_errors >= MIN_STANDARD_ERRORS


ALL_ASPECTS = (
    "tap ids",
    "concat order",
    "norm order",
    "module order",
    "d2t offsets",
    "attention window",
    "query position",
    "KV source layers",
)
"""The aspects that every report lists, in this order."""


def aspect_names(aspects: Iterable[Aspect]) -> list[str]:
    """Return the names of reported aspects: `ALL_ASPECTS`, then others of the drafter."""
    return list(dict.fromkeys([*ALL_ASPECTS, *(aspect.name for aspect in aspects)]))


def check_readings(evidence: Evidence, aspects: Iterable[Aspect]) -> list[Finding]:
    """Return a finding for each aspect. Of the clear gains only the largest is a fault, or several that are equally
    large, since the others may follow from it."""
    by_name = {aspect.name: aspect for aspect in aspects}
    scored = {name: _score(evidence, aspect) for name, aspect in by_name.items()}
    gains = [gain.mean for readings in scored.values() for _, gain in readings.values() if gain.is_clear]
    best = max(gains, default=None)
    return [
        _finding(evidence.as_configured, by_name[name], scored[name], best)
        if scored.get(name)
        else does_not_apply(name, _why_not(by_name.get(name), evidence))
        for name in aspect_names(by_name.values())
    ]


def _score(evidence: Evidence, aspect: Aspect) -> dict[str, tuple[Drafted, Gain]]:
    num_draft_tokens = evidence.subject.num_draft_tokens
    drafted = {
        reading.name: evidence.forced.draft(reading.make())
        for reading in aspect.readings
        if reading.min_draft_tokens <= num_draft_tokens
    }
    return {name: (other, gain_of(evidence.as_configured.accepted, other.accepted)) for name, other in drafted.items()}


def gain_of(configured: torch.Tensor, other: torch.Tensor) -> Gain:
    """Return the gain in accepted drafts [pairs] of another reading, which drafted the same rounds."""
    differences = (other - configured).double()
    mean, error = float(differences.mean()), float(differences.std() / len(differences) ** 0.5)
    return Gain(mean, mean / error if error > 0 else float("inf") * mean if mean else 0.0)


def _finding(
    configured: Drafted, aspect: Aspect, scored: dict[str, tuple[Drafted, Gain]], best: float | None
) -> Finding:
    others = ", ".join(f"{drafted.mean_accepted:.2f} {name}" for name, (drafted, _) in scored.items())
    measured = f"{configured.mean_accepted:.2f} drafts accepted a round as configured ({aspect.configured}); {others}"
    name, (_, gain) = max(scored.items(), key=lambda item: (item[1][1].is_clear, item[1][1].mean))
    if not gain.is_clear:
        return Finding(aspect.name, Verdict.OK, measured)
    if gain.mean != best:
        return Finding(aspect.name, Verdict.SUSPICIOUS, measured)
    cause = f"read as {aspect.configured}, but {name} gives {gain.mean:+.2f} drafts a round"
    return Finding(aspect.name, Verdict.FAULT, measured, cause)


def _why_not(aspect: Aspect | None, evidence: Evidence) -> str:
    name = evidence.subject.config.drafter.name
    if aspect is None:
        return f"drafter={name} has no such choice"
    if aspect.readings:
        num_draft_tokens = evidence.subject.num_draft_tokens
        return f"it only changes drafts after the first; drafter.num_draft_tokens={num_draft_tokens} makes none"
    return f"there is no other way to read {aspect.configured}"
