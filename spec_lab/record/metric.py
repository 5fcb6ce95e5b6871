"""A metric is one function with a name, a unit and a definition; its docstring's first paragraph is the definition.

    @metric("round_ms", unit="ms", per="turn")
    def round_ms(turn): ...

What a function returns is flattened to dotted names: `{"p50": 1.0}` of `latency_ms.ttft` is `latency_ms.ttft.p50`, the
entries of a list have the names 1, 2, ..., and the key `value` stands for the name itself.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from spec_lab.core.errors import describe_error

if TYPE_CHECKING:
    from spec_lab.core.results import GenerationResult, RoundRecord
    from spec_lab.record.draft_counts import RoundTotals
    from spec_lab.record.models import Numbers, Part, Request

Per = Literal["requests", "turn", "run", "round"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a run, or several with one name.

    Attributes:
        per: what `compute` takes. `requests`: a `Measured`, also one with the requests of one category alone. `turn`:
            the `GenerationResult` of a timed turn; the run's number is the median over turns. `run`: a `Measured`.
            `round`: a `RoundRecord`; the run's number is the mean over the first turn's rounds.
        inside: whether it counts what happens inside the lab's own engine, and of others is unknown.
    """

    name: str
    unit: str
    definition: str
    per: Per
    compute: Callable[[Any], Any]
    inside: bool = False


EXTENSION_PREFIX = "metrics."
METRICS: dict[str, Metric] = {}
"""All metrics, in the order in which their modules define them. Names of modules outside the lab begin with
`EXTENSION_PREFIX`."""


def metric(name: str, unit: str = "", per: Per = "run", inside: bool = False) -> Callable[[Function], Function]:
    """Register a function as a metric: of the lab, or of an extension, which every run that loads it records."""

    def register(function: Function) -> Function:
        definition = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        own = name if function.__module__.startswith("spec_lab.") else f"{EXTENSION_PREFIX}{name}"
        METRICS[own] = Metric(own, unit, definition, per, compute=function, inside=inside)
        return function

    return register


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration: what it gave out, and the timed turns.

    Attributes:
        requests: those of the first turn, from which tokens, acceptance and answers are counted, since every turn
            should give the same.
        repeats: the result of each timed turn.
        references: the configurations that took turns with it.
        is_compared: whether the outputs were compared with plain decoding's.
        work: counts of the profiled rounds, by the names of metrics.
        is_ours: whether the lab's own engine decoded.
        tells_offers: whether it is known which rounds offered a draft.
        beside_lab: whether another engine's outputs were compared with the lab's plain decoding.
        totals: counts of the first turn, from an engine that does not tell them by request.
        told: what another engine tells of itself, by its own names.
    """

    requests: Sequence[Request] = ()
    repeats: Sequence[GenerationResult] = ()
    num_draft_tokens: int = 0
    references: Mapping[str, Measured] = field(default_factory=dict)
    is_compared: bool = False
    work: Mapping[str, float | None] = field(default_factory=dict)
    is_ours: bool = True
    tells_offers: bool = True
    beside_lab: bool = False
    totals: RoundTotals | None = None
    told: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def first(self) -> GenerationResult:
        """Return the first turn."""
        return self.repeats[0]

    def tells(self, name: str) -> bool:
        """Return whether a field of the requests is known, which an engine other than the lab's may not tell."""
        return self.is_ours or any(getattr(request, name) is not None for request in self.requests)

    def rounds(self) -> Iterator[tuple[RoundRecord, int]]:
        """Yield the first turn's rounds in which the requests were, each with the request's place in its lists."""
        ids = {request.id for request in self.requests}
        for record in self.first.rounds:
            for place, request_id in enumerate(record.request_ids):
                if request_id in ids:
                    yield record, place


def part_of(measured: Measured) -> Part:
    """Compute all numbers of a configuration."""
    from spec_lab.record.models import Part

    turns = [numbers_of("turn", result) for result in measured.repeats]
    rounds = [numbers_of("round", record) for record in measured.first.rounds]
    numbers = numbers_of("requests", measured) | numbers_of("run", measured)
    for pooled, each in ((median_of, turns), (mean_of, rounds)):
        names = dict.fromkeys(name for found in each for name in found)
        numbers |= {name: pooled(found.get(name) for found in each) for name in names}
    by_category = {}
    for category in sorted({request.category for request in measured.requests}):
        requests = [request for request in measured.requests if request.category == category]
        by_category[category] = numbers_of("requests", replace(measured, requests=requests, totals=None))
    return Part(num_draft_tokens=measured.num_draft_tokens, metrics=numbers, repeats=turns, by_category=by_category)


def flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a metric's value by dotted names. Infinity, which JSON lacks, is None."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value, start=1))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flattened(name if key == "value" else f"{name}.{key}", part)
    else:
        yield name, None if isinstance(value, float) and not math.isfinite(value) else value


def numbers_of(per: Per, of: object) -> Numbers:
    """Compute the metrics of one kind. One of an extension that fails has no value, since the run is done."""
    found: Numbers = {}
    for each in METRICS.values():
        if each.per != per or (each.inside and isinstance(of, Measured) and not of.is_ours):
            continue
        try:
            found |= flattened(each.name, each.compute(of))
        except Exception as error:
            if not each.name.startswith(EXTENSION_PREFIX):
                raise
            warnings.warn(f"metric {each.name} has no value: {describe_error(error)}", stacklevel=2)
            found[each.name] = None
    return found


def median_of(values: Iterable[Any]) -> float | None:
    """Return the median of the values that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def mean_of(values: Iterable[Any]) -> float | None:
    """Return the mean of the values that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio of two numbers; None if the second is 0 or one of them unknown."""
    return None if numerator is None or not denominator else numerator / denominator
