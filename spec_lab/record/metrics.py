"""Metrics of extensions: numbers of a round and of a run that an extension computes in addition to the lab's.

A metric that fails has no value where it failed, and prints one message; the run is unaffected.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from spec_lab.core.errors import describe_error

if TYPE_CHECKING:
    from spec_lab.core.results import GenerationResult, RoundRecord


class Metric(Protocol):
    """The interface of a metric that an extension registers (`menu.option.MetricOption`)."""

    @property
    def name(self) -> str: ...
    @property
    def definition(self) -> str: ...
    @property
    def of_round(self) -> Callable[[RoundRecord], float | None] | None: ...
    @property
    def of_run(self) -> Callable[[GenerationResult], float | None] | None: ...


@dataclass(slots=True)
class OwnMetrics:
    """The metrics of a run's extensions."""

    metrics: Sequence[Metric] = ()
    _failed: set[str] = field(default_factory=set)

    def of_round(self, record: RoundRecord) -> dict[str, float | None]:
        """Return the numbers of one round."""
        return {metric.name: self._value(metric, metric.of_round, record) for metric in self.metrics if metric.of_round}

    def of_run(self, result: GenerationResult | None) -> dict[str, float | None]:
        """Return the numbers of a pass: those defined for a run, and means over rounds of those defined only for a
        round."""
        if result is None:
            return {}
        return {metric.name: self._of_pass(metric, result) for metric in self.metrics}

    @property
    def definitions(self) -> dict[str, str]:
        """Return the definition of each metric, by its key in a record."""
        return {f"metrics.{metric.name}": metric.definition for metric in self.metrics}

    def _of_pass(self, metric: Metric, result: GenerationResult) -> float | None:
        if metric.of_run is not None:
            return self._value(metric, metric.of_run, result)
        values = [self._value(metric, metric.of_round, record) for record in result.rounds]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def _value(self, metric: Metric, compute: Callable[[Any], float | None] | None, of: object) -> float | None:
        try:
            value = None if compute is None else compute(of)
            number = None if value is None else float(value)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{number} is not a finite number")
        except Exception as error:  # an extension's code may raise anything, and the run is done
            if metric.name not in self._failed:
                print(f"metric {metric.name} has no value: {describe_error(error)}", file=sys.stderr)
            self._failed.add(metric.name)
            return None
        return number
