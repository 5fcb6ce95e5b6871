"""All metrics of a run: importing this module defines the lab's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spec_lab.record import answers, times
from spec_lab.record.acceptance import ROW_DEFINITIONS
from spec_lab.record.metric import METRICS, Metric

__all__ = ["answers", "times"]


def definitions(extra: Iterable[Metric] = ()) -> dict[str, str]:
    """Return the definition of each metric by its name, with its unit."""
    every: list[Metric] = [*METRICS.values(), *extra]
    units = {each.name: f" [{each.unit}]" if each.unit else "" for each in every}
    return {**{each.name: f"{each.definition}{units[each.name]}" for each in every}, **ROW_DEFINITIONS}


def metric_of(option: Any) -> Metric:
    """Return the metric of an extension's option (`menu.option.MetricOption`); its name begins with `metrics.`."""
    name, compute = f"metrics.{option.name}", option.of_run or option.of_round
    return Metric(name, option.unit, option.definition, "turn" if option.of_run else "round", compute)
