"""The table that compares drafters: acceptance length, cost of a round and speedup of each at each K.

`python -m spec_lab.report FOLDER` shows it for runs that differ in their drafter alone, such as `experiment=drafters`.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.record.paired import PairedRatio, over_reference
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.time_metrics import draft_ms
from spec_lab.record.wording import ABSENT, number
from spec_lab.report.cells import ratio_cell
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.frame import predicted_speedup
from spec_lab.report.table import format_table, paragraph, table_width, text_width

NOT_COMPARED = (*BESIDE_THE_RUN, "drafter")
COLUMNS_EXPLAINED: Mapping[str, str] = {
    "acceptance length": "Tokens of a request round, including the bonus or correction token, pooled over the "
    "prompts (all) and by category. A round cut by a limit counts as judged; drafts after an end of sequence do not "
    "count.",
    "@1, @2, ...": "Percent of the request rounds that accept the draft at this position; 1 + their sum / 100 is the "
    "acceptance length.",
    "draft ms": "The drafter's stages (catchup, recur, draft, lookup): the time a round spends in the drafter, from "
    "the target's features to the new drafts.",
    "draft/plain": "The same, divided by the time of a whole round of plain decoding (a plain step).",
    "verify/plain": "The target's forward over the rows that a round verifies, in plain steps: K + 1 a request, or "
    "those of the tree. Where drafts are left out there may be fewer.",
    "break-even": "Whole time of a request round, in plain steps: the acceptance length from which drafting "
    "pays. At batch 1 it exceeds draft + verify by accept, commit, readback and the time between stages.",
    "predicted": "Expected speedup of the decode rate: acceptance length / break-even.",
    "measured": "Decode rate over that of plain decoding, turn by turn: geometric mean, with its 95 % interval from "
    "three turns on.",
    "end to end": "The same mean for all output tokens over the whole call, prompt passes included.",
}
HOW_THEY_DIFFER = """\
Predicted and measured differ for two reasons. A round cut short by EOS or a limit counts in measured with the
tokens it kept. The acceptance length takes a round cut by a limit as it was judged, and estimates what EOS hid. So
measured is lower, most of all with short outputs. Also, break-even is a median over turns, and measured a mean. Only
end to end includes the prompt pass, in which a drafter reads the prompt and makes its first drafts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One drafter at one K.

    Attributes:
        drafter: its name, with the knobs in which it differs from other drafters of that name.
        summary: that of its newest finished run, or of the newest run if none finished.
    """

    drafter: str
    num_draft_tokens: int
    summary: Summary

    @property
    def is_finished(self) -> bool:
        return self.summary["status"] == "finished"

    @property
    def draft_ms(self) -> float | None:
        return draft_ms(self.summary)

    @property
    def verify_ms(self) -> float | None:
        return self.summary["stage_ms_per_round"].get("verify")

    @property
    def predicted_speedup(self) -> float | None:
        return predicted_speedup(self.summary)

    @property
    def speedup(self) -> PairedRatio | None:
        return over_reference(self.summary, self.summary, "plain")

    @property
    def end_to_end_speedup(self) -> PairedRatio | None:
        """Return the speedup of the whole call, prompt passes included."""
        return over_reference(self.summary, self.summary, "plain", "end_to_end_tokens_per_second")

    def in_plain_steps(self, milliseconds: float | None) -> float | None:
        """Return a time divided by that of a plain decoding round; None without that reference."""
        plain = self.summary["references"].get("plain")
        plain_ms = None if plain is None else plain["round_ms"]
        return milliseconds / plain_ms if milliseconds is not None and plain_ms else None


def read_comparisons(runs: Sequence[Run]) -> list[list[Cell]]:
    """Find the comparisons among `runs` (oldest first): groups of runs that differ in the drafter and its K alone.

    Cells are sorted by drafter, in the order in which they first ran, then by K. If a cell has several runs, the newest
    finished one is used, so that a repeated sweep fills the cells that an earlier one left empty. Lossy rules are left
    out, since their texts depend on the drafter. So are a single cell, and a single drafter without a plain decoding
    reference, since there is nothing to compare them with.
    """
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.summary["config"].get("drafter", {}).get("num_draft_tokens") and not _is_lossy(run.summary):
            groups[_key(run)].append(run)
    comparisons = [_cells(group) for group in groups.values()]
    return [cells for cells in comparisons if _compares(cells)]


def format_comparison(cells: Sequence[Cell]) -> str:
    """Write the title, the tables, what is missing and why, and the meanings of the columns."""
    names = {
        "drafter": [cell.drafter for cell in cells],
        "K": [str(cell.num_draft_tokens) for cell in cells],
    }
    lengths, positions = _length_columns(cells), _position_columns(cells)
    together = _table(names | lengths | positions)
    is_narrow = max(map(len, together.splitlines())) <= table_width()
    parts = [
        _title(cells),
        *([together] if is_narrow else [_table(names | lengths), _table(names | positions)]),
        _table(names | _cost_columns(cells)),
        "\n".join(_notes(cells)),
        _explanations(),
        paragraph(HOW_THEY_DIFFER),
    ]
    return "\n\n".join(part for part in parts if part)


def _is_lossy(summary: Summary) -> bool:
    """Return whether the acceptance rule is lossy. Imposed acceptance counts as lossy: it does not depend on the
    drafter."""
    return summary["acceptance_imposed"] or summary["acceptance_lossless"] is False


def _key(run: Run) -> str:
    config = {key: value for key, value in run.summary["config"].items() if key not in NOT_COMPARED}
    return json.dumps(config, sort_keys=True)


def _cells(runs: Sequence[Run]) -> list[Cell]:
    chosen: dict[tuple[str, int], Run] = {}
    labels = _labels(runs)
    for label, run in zip(labels, runs, strict=True):
        place = label, run.summary["config"]["drafter"]["num_draft_tokens"]
        if place not in chosen or run.summary["status"] == "finished" or not _finished(chosen[place]):
            chosen[place] = run
    order = list(dict.fromkeys(labels))
    cells = [Cell(label, k, run.summary) for (label, k), run in chosen.items()]
    return sorted(cells, key=lambda cell: (order.index(cell.drafter), cell.num_draft_tokens))


def _finished(run: Run) -> bool:
    return run.summary["status"] == "finished"


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return each run's drafter name, with `knob=value` for every knob of which that name has several values.

    Old records call a drafter `eagle3` even if it has a window, which is now part of the name.
    """
    names = [run.summary["choices"].get("drafter", run.summary["config"]["drafter"]["name"]) for run in runs]
    knobs: list[Mapping[str, Any]] = [
        {key: value for key, value in run.summary["config"]["drafter"].items() if key != "num_draft_tokens"}
        for run in runs
    ]
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, settings in zip(names, knobs, strict=True):
        for key, value in settings.items():
            values[name, key].add(str(value))
    return [
        " ".join([name, *(f"{key}={value}" for key, value in settings.items() if len(values[name, key]) > 1)])
        for name, settings in zip(names, knobs, strict=True)
    ]


def _compares(cells: Sequence[Cell]) -> bool:
    finished = [cell for cell in cells if cell.is_finished]
    has_plain = any("plain" in cell.summary["references"] for cell in finished)
    return bool(finished) and len(cells) > 1 and (has_plain or len({cell.drafter for cell in cells}) > 1)


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    return format_table(list(columns), list(zip(*columns.values(), strict=True)), left=("drafter",), num_keys=2)


def _length_columns(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return columns of the acceptance length, pooled and by category. A run that did not finish has its status in the
    first."""
    categories = sorted({category for cell in cells for category in cell.summary["by_category"]})
    return {"all": [_length(cell) for cell in cells]} | {
        category: [_category_length(cell.summary, category) for cell in cells] for category in categories
    }


def _position_columns(cells: Sequence[Cell]) -> dict[str, list[str]]:
    rates = [cell.summary["acceptance_rate_by_position"]["unconditional"] for cell in cells]
    return {
        f"@{position + 1}": [_percent(row[position]) if position < len(row) else "" for row in rates]
        for position in range(max(map(len, rates)))
    }


def _cost_columns(cells: Sequence[Cell]) -> dict[str, list[str]]:
    return {
        "acceptance": [_length(cell) for cell in cells],
        "draft ms": [number(cell.draft_ms) for cell in cells],
        "draft/plain": [number(cell.in_plain_steps(cell.draft_ms)) for cell in cells],
        "verify/plain": [number(cell.in_plain_steps(cell.verify_ms)) for cell in cells],
        "break-even": [number(cell.summary["break_even_acceptance_length"]) for cell in cells],
        "predicted": [number(cell.predicted_speedup) for cell in cells],
        "measured": [ratio_cell(cell.speedup) for cell in cells],
        "end to end": [_mean(cell.end_to_end_speedup) for cell in cells],
    }


def _length(cell: Cell) -> str:
    return number(cell.summary["acceptance_length"]) if cell.is_finished else cell.summary["status"]


def _category_length(summary: Summary, category: str) -> str:
    outcome = summary["by_category"].get(category)
    return number(None if outcome is None else outcome["acceptance_length"])


def _percent(rate: float | None) -> str:
    return number(None if rate is None else 100 * rate, 0)


def _mean(ratio: PairedRatio | None) -> str:
    return number(None if ratio is None else ratio.value)


def _title(cells: Sequence[Cell]) -> str:
    """Return a line that says what all cells have in common, and where they ran."""
    summaries = [cell.summary for cell in cells if cell.is_finished]
    choices, config = summaries[0]["choices"], summaries[0]["config"]
    shared = [f"{group}={choices[group]}" for group in ("target", "acceptance", "prune", "graph") if group in choices]
    places = dict.fromkeys(f"{s['device_name']}, {s['dtype']}, threads {s['num_threads']}" for s in summaries)
    counts = f"batch {config.get('batch_size', ABSENT)}, {summaries[0]['num_requests']} prompts"
    text = f"Drafters side by side: {', '.join([*shared, counts])}; on {' and on '.join(places)}"
    return paragraph(text)


def _notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes: why a cell has no numbers, and the results of the audit for the others."""
    finished = [cell for cell in cells if cell.is_finished]
    notes = [
        f"{_name(cell)} {cell.summary['status']}: {cell.summary['reason']}" for cell in cells if not cell.is_finished
    ]
    if absent := _absent(cells):
        notes.append(f"not run: {', '.join(absent)}")
    if alone := [_name(cell) for cell in finished if "plain" not in cell.summary["references"]]:
        notes.append(f"no ratio to plain decoding, for want of references=[plain]: {', '.join(alone)}")
    return [paragraph(note, indent="  ") for note in [*notes, _audit(finished)]]


def _name(cell: Cell) -> str:
    return f"{cell.drafter} K={cell.num_draft_tokens}"


def _absent(cells: Iterable[Cell]) -> list[str]:
    """Return the combinations of drafter and K that were not run, though both were in other runs."""
    run = {(cell.drafter, cell.num_draft_tokens): None for cell in cells}
    drafters, lengths = dict.fromkeys(drafter for drafter, _ in run), sorted({k for _, k in run})
    return [f"{drafter} K={k}" for drafter in drafters for k in lengths if (drafter, k) not in run]


def _audit(cells: Sequence[Cell]) -> str:
    """Return a line that says whether the outputs equalled plain decoding's, over all cells."""
    counts = [count for cell in cells if (count := cell.summary["divergence"]) is not None]
    if not counts:
        return "audit: no output was compared with plain decoding"
    requests, near_ties, bugs = (sum(count[key] for count in counts) for key in ("requests", "near_ties", "bugs"))
    wrong = [_name(cell) for cell in cells if (count := cell.summary["divergence"]) is not None and count["bugs"]]
    text = f"audit: {requests:,} outputs of {len(counts)} runs compared with plain decoding, {near_ties} near-ties"
    return f"{text}, {bugs} bugs{' in ' + ', '.join(wrong) if wrong else ''}"


def _explanations() -> str:
    width = max(map(len, COLUMNS_EXPLAINED)) + 2
    return "\n".join(
        textwrap.fill(text, text_width(), initial_indent=name.ljust(width), subsequent_indent=" " * width)
        for name, text in COLUMNS_EXPLAINED.items()
    )
