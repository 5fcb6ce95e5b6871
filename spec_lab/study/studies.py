"""A study's tables and figures, as its YAML asks for them (`study:` in `conf/experiment/`, which each run keeps).

study:
  question: what is asked
  keys: {K: drafter.num_draft_tokens, prune: prune}      # what names a row: header: column of the frame
  columns: {length: acceptance_length, ms: round_ms}     # the numbers of a row
  across: prune                                          # a key whose values become columns, of the first number
  plot: {x: K, y: speedup.mean, hue: prune, even: 1}     # headers or columns of the frame
  tables: [knobs, costs]                                 # names of `TABLES`
  figures: [plot, lengths]                               # names of `FIGURES`
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from spec_lab.record.names import THIS_RUN
from spec_lab.record.reading import Found
from spec_lab.study import figures, plans, reliability
from spec_lab.study.compare import comparison_table, cost_table, drafting, rule_table
from spec_lab.study.frame import frame, labels, lengths_by_frame, own, positions_frame
from spec_lab.study.lengths import lengths_table
from spec_lab.study.run_table import latency_rows, rows_as_table, stages_table
from spec_lab.study.tables import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Spec = Mapping[str, Any]
PLAIN = "plain"


def studies_in(runs: Sequence[Found]) -> list[tuple[Spec, list[Found]]]:
    """Return the studies among runs, each with its finished runs."""
    found: dict[str, tuple[Spec, list[Found]]] = {}
    for each in runs:
        spec = each.run.config.get("study") or {}
        if spec.get("question") and each.run.status == "finished":
            found.setdefault(spec["question"], (spec, []))[1].append(each)
    return list(found.values())


def study_tables(spec: Spec, runs: Sequence[Found]) -> list[Table]:
    """Return the tables that a study asks for; those without rows are left out."""
    tables = [TABLES[name](runs, spec) for name in spec.get("tables") or ["knobs"]]
    return [table for table in tables if len(table.shown) and table.shown.shape[1]]


def study_figures(spec: Spec, runs: Sequence[Found]) -> dict[str, figures.Draw]:
    """Return the figures that a study asks for, not drawn yet, by name."""
    return {name: partial(FIGURES[name], runs, spec) for name in spec.get("figures") or ["plot"]}


def knobs_table(runs: Sequence[Found], spec: Spec) -> Table:
    """Return a line for each run: the study's keys, then its numbers."""
    rows = sorted_by(own(frame(runs)), list((spec.get("keys") or {}).values()))
    columns = {**(spec.get("keys") or {"line": "line"}), **(spec.get("columns") or {})}
    across, numbers = spec.get("across"), spec.get("columns") or {}
    first = next(iter(numbers.values()), None)
    shown = {**(spec.get("keys") or {}), **dict([next(iter(numbers.items()))])} if across and numbers else columns
    return table_of(rows, shown, spec["question"], across=across, shown=first)


def parts_table(runs: Sequence[Found], spec: Spec) -> Table:
    """Return a line for each part of each run: the study's keys, then its numbers."""
    rows = frame(runs)
    rows = sorted_by(rows[rows["status"] == "finished"], list((spec.get("keys") or {}).values()))
    columns = {**(spec.get("keys") or {}), "part": "part", **(spec.get("columns") or {})}
    return table_of(rows, columns, spec["question"])


def plot(runs: Sequence[Found], spec: Spec) -> Figure:
    """Draw the study's number over its knob."""
    keys, asked = spec.get("keys") or {}, spec.get("plot") or {}
    rows = sorted_by(own(frame(runs)), list(keys.values()))
    names = {axis: keys.get(asked[axis], asked[axis]) for axis in ("x", "y", "hue") if asked.get(axis)}
    heads = {column: head for head, column in keys.items()}
    renamed = {name: heads[name] for name in (names["x"], names.get("hue")) if name in heads}
    rows = rows.drop(columns=[head for name, head in renamed.items() if head != name], errors="ignore")
    rows = rows.rename(columns=renamed)
    x, hue = heads.get(names["x"], names["x"]), heads.get(names.get("hue", ""), names.get("hue"))
    title = textwrap.fill(spec["question"], 90)
    return figures.numbers_over(rows, x, names["y"], hue, asked.get("even"), title)


def serving_table(runs: Sequence[Found], spec: Spec) -> Table:
    """Return vLLM's table for each run: a block of lines for each, plain decoding first, with changes from it."""
    names = labels(own(frame(runs))).to_list()
    blocks = []
    for name, each in zip(names, (each for each in runs if each.run.status == "finished"), strict=True):
        run = each.run
        words = {THIS_RUN: run.choices.get("prune", THIS_RUN)}
        order = [
            part
            for part in (PLAIN, *(p for p in run.parts if p not in (PLAIN, THIS_RUN)), THIS_RUN)
            if part in run.parts
        ]
        blocks.append(latency_rows([(words.get(part, part), run.parts[part]) for part in order]).assign(run=name))
    rows = pd.concat(blocks, ignore_index=True)
    table = rows_as_table(rows.drop(columns="run"), spec["question"])
    for part in (table.raw, table.shown):
        part.insert(0, "run", rows["run"])
    return table


def positions_table(runs: Sequence[Found], spec: Spec) -> Table:
    """Return the share of drafts accepted at each position: of all rounds, and of those that got there."""
    rates = positions_frame(frame(runs))
    rates = rates[rates["kind"] != "reached"]
    rates["rate"] = rates["rate"].astype(float)
    wide = rates.pivot_table(index=["label", "kind"], columns="position", values="rate", sort=False).reset_index()
    wide.columns = [f"@{name}" if isinstance(name, int) else str(name) for name in wide.columns]
    return Table("Drafts accepted by position", wide, _shown(wide, "{:.1%}"))


def by_table(runs: Sequence[Found], spec: Spec) -> Table:
    """Return acceptance length by the length of the text, by turn and by phase."""
    found = lengths_by_frame(frame(runs)).assign(place=lambda rows: rows["by"] + " " + rows["of"])
    wide = found.pivot_table(index="label", columns="place", values="acceptance length", sort=False).reset_index()
    note = "context N: rounds that begin at N to 2N - 1 tokens. phase: inside thinking, or in the answer."
    return Table("Acceptance length by context, turn and phase", wide, _shown(wide, "{:.2f}"), note)


def frontier_table(runs: Sequence[Found], spec: Spec) -> Table:
    """Return tokens a second of one request and of all, by batch size, with the best K of each line marked."""
    rows = frame(runs)
    rows = rows[(rows["status"] == "finished") & rows["part"].isin([THIS_RUN, PLAIN])]
    rows = rows.drop_duplicates(["batch_size", "part", "drafter", "line", "K"]).sort_values(["batch_size", "K"])
    gains = rows["speedup.mean"].fillna(1.0) if "speedup.mean" in rows else rows["decode_tokens_per_second"]
    best = gains.groupby([rows["batch_size"], rows["line"].fillna(rows["drafter"])]).transform("max")
    rows = rows.assign(
        best=[
            "yes" if is_best and part == THIS_RUN else None
            for is_best, part in zip(gains == best, rows["part"], strict=True)
        ]
    )
    columns = {
        "batch": "batch_size", "part": "part", "line": "line", "drafter": "drafter", "K": "K",
        "tok/s a request": "tokens_per_second_a_user",
        "tok/s of all": "decode_tokens_per_second", "speedup": "speedup.mean", "best K": "best",
        "drafter's share": "drafter_share",
    }  # fmt: skip
    return table_of(rows, columns, "The frontier by batch size")


def sorted_by(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Sort rows by columns: numbers by value, texts in the order in which they came."""
    known = [key for key in keys if key in rows]
    places = {key: {value: place for place, value in enumerate(dict.fromkeys(rows[key]))} for key in known}
    is_text = {key: not pd.api.types.is_numeric_dtype(rows[key]) for key in known}
    return (
        rows.sort_values(known, key=lambda part: part.map(places[part.name]) if is_text[part.name] else part)
        if known
        else rows
    )


TABLES: dict[str, Callable[[Sequence[Found], Spec], Table]] = {
    "knobs": knobs_table,
    "parts": parts_table,
    "serving": serving_table,
    "comparison": lambda runs, spec: comparison_table(runs),
    "costs": lambda runs, spec: cost_table(runs),
    "rules": lambda runs, spec: rule_table(runs),
    "positions": positions_table,
    "by": by_table,
    "frontier": frontier_table,
    "beside": lambda runs, spec: plans.beside_table(runs, spec.get("keys") or {}),
    "plan": lambda runs, spec: plans.plan_table(runs),
    "reliability": lambda runs, spec: reliability.reliability_table(runs),
    "lengths": lambda runs, spec: lengths_table(runs),
    "stages": lambda runs, spec: stages_table(frame(runs)),
}
FIGURES: dict[str, Callable[[Sequence[Found], Spec], Figure]] = {
    "plot": plot,
    "lengths": lambda runs, spec: figures.acceptance_lengths(frame(runs)),
    "positions": lambda runs, spec: figures.acceptance_by_position(frame(runs)),
    "by": lambda runs, spec: figures.acceptance_by_context(frame(runs)),
    "categories": lambda runs, spec: figures.lengths_by_category(drafting(runs)),
    "stages": lambda runs, spec: figures.stage_times(frame(runs)),
    "costs": lambda runs, spec: figures.cost_model(frame(runs)),
    "frontier": lambda runs, spec: figures.frontier(frame(runs)),
    "plan": lambda runs, spec: plans.plan_figure(runs),
    "reliability": lambda runs, spec: reliability.reliability_figure(runs),
    "rules": lambda runs, spec: figures.gain_against_loss(rule_table(runs)),
}


def _shown(table: pd.DataFrame, form: str) -> pd.DataFrame:
    return table.map(lambda value: value if isinstance(value, str) else "-" if pd.isna(value) else form.format(value))
