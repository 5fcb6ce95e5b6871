"""Makes the finished record of a run from what was measured, with the definition of every number."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

from spec_lab.core.results import RowCounts
from spec_lab.record import answers, times  # noqa: F401  they define the lab's metrics
from spec_lab.record.metric import METRICS, Measured, part_of
from spec_lab.record.models import Run
from spec_lab.record.recorder import ended

ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def finished_run(begun: Run, main: Measured, **found: Any) -> Run:
    """Return the record of a run that finished.

    Args:
        begun: what was known before it decoded.
        found: further fields of the record.
    """
    others = main.references
    references = {
        name: part_of(replace(each, references={n: others[n] for n in others if n != name}))
        for name, each in others.items()
    }
    own = dict(part_of(main))
    return ended(begun, "finished", **own, references=references, definitions=definitions(), **found)


def definitions() -> dict[str, str]:
    """Return the definition of each metric by its name, with its unit."""
    told = {each.name: f"{each.definition}{each.unit and f' [{each.unit}]'}" for each in METRICS.values()}
    rows = ATTRIBUTE.findall(inspect.getdoc(RowCounts) or "")
    return told | {f"rows.{name}": " ".join(text.split()) for name, text in rows}
