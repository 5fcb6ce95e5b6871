"""Other readings of the same checkpoint, scored by their drafts under teacher forcing.

A config.json may not state a choice, or state it in a way that engines read differently. A wrong reading lowers
acceptance without an error. So each such choice is also made the other way, in memory, over the same rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spec_lab.doctor.aspects import Aspect, read_as
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Finding, Verdict
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


def check_readings(evidence: Evidence, aspects: Sequence[Aspect]) -> list[Finding]:
    """Return a finding for each aspect. Of the clear gains only the largest is a fault, or several that are equally
    large, since the others may follow from it."""
    configured = evidence.as_configured
    scored = {
        aspect.name: {name: evidence.forced.draft(read_as(*reading)) for name, reading in aspect.others.items()}
        for aspect in aspects
    }
    gains = [gain_of(configured.accepted, drafted.accepted) for of in scored.values() for drafted in of.values()]
    best = max((gain.mean for gain in gains if gain.is_clear), default=None)
    return [_finding(configured, aspect, scored[aspect.name], best) for aspect in aspects]


def gain_of(configured: torch.Tensor, other: torch.Tensor) -> Gain:
    """Return the gain in accepted drafts [pairs] of another reading, which drafted the same rounds."""
    differences = (other - configured).double()
    mean, error = float(differences.mean()), float(differences.std() / len(differences) ** 0.5)
    return Gain(mean, mean / error if error > 0 else float("inf") * mean if mean else 0.0)


def _finding(configured: Drafted, aspect: Aspect, others: Mapping[str, Drafted], best: float | None) -> Finding:
    listed = ", ".join(f"{drafted.mean_accepted:.2f} {name}" for name, drafted in others.items())
    measured = f"{configured.mean_accepted:.2f} drafts accepted a round as configured ({aspect.configured}); {listed}"
    gains = {name: gain_of(configured.accepted, drafted.accepted) for name, drafted in others.items()}
    name, gain = max(gains.items(), key=lambda item: (item[1].is_clear, item[1].mean))
    if not gain.is_clear:
        return Finding(aspect.name, Verdict.OK, measured)
    if gain.mean != best:
        return Finding(aspect.name, Verdict.SUSPICIOUS, measured)
    cause = f"read as {aspect.configured}, but {name} gives {gain.mean:+.2f} drafts a round"
    return Finding(aspect.name, Verdict.FAULT, measured, cause)
