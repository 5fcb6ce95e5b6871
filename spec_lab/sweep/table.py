"""The table at the end of a sweep, best first if there is a metric."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from spec_lab.program.table import format_table
from spec_lab.record.wording import number
from spec_lab.sweep.file import SweepFile
from spec_lab.sweep.ledger import LEDGER_FILE
from spec_lab.sweep.session import Trial

WIDTH = 80
LONGEST_CELL = 24


def format_trials(file: SweepFile, trials: Sequence[Trial]) -> str:
    """Write a line for each run with the swept parameters. Parameters beyond the width are left out, with a note."""
    names = [name for name, parameter in file.parameters.items() if "value" not in parameter]
    shown = list(names)
    while len(shown) > 1 and _width(_table(file, trials, shown)) > WIDTH:
        shown.pop()
    table = _table(file, trials, shown)
    left_out = names[len(shown) :]
    if not left_out:
        return table
    return "\n".join([table, textwrap.fill(f"not shown: {', '.join(left_out)}; {LEDGER_FILE} has them", WIDTH)])


def _table(file: SweepFile, trials: Sequence[Trial], names: Sequence[str]) -> str:
    metric = [] if file.metric is None else [file.metric]
    body = [
        [
            str(trial.number + 1),
            *[_cell(trial.parameters.get(name)) for name in names],
            *[number(trial.metric, 3) for _ in metric],
            trial.outcome.status,
        ]
        for trial in _ranked(file, trials)
    ]
    return format_table(["run", *_short_names(names), *metric, "status"], body, left=("status",), width=sys.maxsize)


def _ranked(file: SweepFile, trials: Sequence[Trial]) -> list[Trial]:
    """Rank the trials, best first and those without a value last; without a metric they are in the order in which they
    ran."""
    sign = -1.0 if file.maximizes else 1.0
    return sorted(trials, key=lambda trial: (trial.metric is None, sign * (trial.metric or 0.0)))


def _short_names(names: Sequence[str]) -> list[str]:
    """Return `num_draft_tokens` for `drafter.num_draft_tokens`, unless two end alike."""
    leaves = [name.rpartition(".")[2] for name in names]
    return [leaf if leaves.count(leaf) == 1 else name for leaf, name in zip(leaves, names, strict=True)]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."


def _width(table: str) -> int:
    return max(map(len, table.splitlines()))
