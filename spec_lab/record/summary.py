"""Makes the finished record of a run from what was measured, with the definition of every number."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from spec_lab.core.results import RowCounts
from spec_lab.record import answers, times
from spec_lab.record.metric import METRICS, Measured, Metric, part_of
from spec_lab.record.models import Kernel, Run
from spec_lab.record.verdict import verdict

__all__ = ["answers", "times"]  # importing them defines the lab's metrics
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def finished_run(
    begun: Run, main: Measured, metrics: Sequence[Metric] = (), kernels: Sequence[Any] = (), **found: Any
) -> Run:
    """Return the record of a run that finished.

    Args:
        begun: what was known before it decoded.
        metrics: those of extensions.
        kernels: the kernels of the profiled rounds.
        found: further fields of the record.
    """
    others = main.references
    parts = {
        name: part_of(replace(each, references={n: others[n] for n in others if n != name}), metrics)
        for name, each in others.items()
    }
    own = part_of(main, metrics)
    fields = {
        **{name: getattr(own, name) for name in type(own).model_fields},
        "status": "finished",
        "reason": None,
        "references": parts,
        "kernels": [Kernel.model_validate(kernel) for kernel in kernels],
        "definitions": definitions(metrics),
        **found,
    }
    run = begun.model_copy(update=fields)
    return run.model_copy(update={"verdict": verdict(run)})


def definitions(extra: Iterable[Metric] = ()) -> dict[str, str]:
    """Return the definition of each metric by its name, with its unit."""
    told = {each.name: f"{each.definition}{each.unit and f' [{each.unit}]'}" for each in (*METRICS.values(), *extra)}
    rows = ATTRIBUTE.findall(inspect.getdoc(RowCounts) or "")
    return told | {f"rows.{name}": " ".join(text.split()) for name, text in rows}


def metric_of(option: Any) -> Metric:
    """Return the metric of an extension's option (docs/extend.md); its name begins with `metrics.`."""
    name, compute = f"metrics.{option.name}", option.of_run or option.of_round
    return Metric(name, option.unit, option.definition, "turn" if option.of_run else "round", compute)
