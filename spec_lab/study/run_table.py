"""The tables of one run, and the table of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from spec_lab.record.models import Run
from spec_lab.record.names import THIS_RUN
from spec_lab.record.reading import Found
from spec_lab.record.times import STAGES
from spec_lab.study.frame import EVERY_CATEGORY, categories_frame, frame, own, varied
from spec_lab.study.tables import Table, joined, paragraph, table_of, written

IMPOSED = "* the acceptance was imposed, not measured."
LATENCIES = {
    "TTFT": "latency_ms.ttft",
    "TPOT": "latency_ms.tpot",
    "ITL": "latency_ms.itl",
    "end to end": "latency_ms.e2e",
}
THROUGHPUTS = {
    "requests/s": "requests_per_second",
    "output tokens/s": "end_to_end_tokens_per_second",
    "total tokens/s": "total_tokens_per_second",
    "requests in flight": "requests_in_flight",
}
SPEED = {
    "": "part",
    "acceptance length": "acceptance_length",
    "decode tok/s": "decode_tokens_per_second",
    "end-to-end tok/s": "end_to_end_tokens_per_second",
    "prompt tok/s": "prompt_tokens_per_second",
    "speedup over plain": "speedup.mean",
    "accuracy": "accuracy",
    "peak memory": "memory.peak_rss_bytes",
    "on the GPU": "memory.peak_cuda_bytes",
}
LAB = "lab"
SPEED_BESIDE = {"": "part", "common length": "common_length", **{k: v for k, v in SPEED.items() if k}}
SHOWN_ANYWAY = ("drafter", "prune", "acceptance", "drafter.num_draft_tokens", "experiment", "size")
EXPERTS = ("verify", "catchup", "recur")


def format_run(run: Run) -> str:
    """Write one run for a terminal: its parts, its categories, its latencies and the verdict."""
    if run.status != "finished":
        return paragraph(run.verdict)
    return "\n\n".join([joined(tables_of_run(run)), paragraph(run.verdict)])


def tables_of_run(run: Run) -> list[Table]:
    """Return the tables of one run, those with rows."""
    parts = frame([Found(Path(), run)])
    note = IMPOSED if run.acceptance_imposed else ""
    tables = [
        table_of(parts, SPEED if run.engine == LAB else SPEED_BESIDE, "Speed", note),
        stages_table(parts),
        latency_table(run),
        experts_table(parts),
        table_of(
            parts, {"": "part", **{n.removeprefix("metrics."): n for n in parts if n.startswith("metrics.")}}, "Metrics"
        ),
        categories_table(run),
    ]
    # Verdict and folder give the provenance of one run, so that no caption does.
    return [replace(each, origin=pd.DataFrame()) for each in tables if each.shown.shape[1] > 1 and len(each.shown)]


def stages_table(parts: pd.DataFrame) -> Table:
    """Return the times of a round's stages, a row a part."""
    seen = [name for name in parts if name.startswith("stage_ms_per_round.")]
    names = [f"stage_ms_per_round.{stage}" for stage in STAGES]
    ordered = [*(name for name in names if name in seen), *(name for name in seen if name not in names)]
    stages = {name.partition(".")[2]: name for name in ordered}
    together = {"draft": "draft is catchup and recur in one graph.", "graph": "graph is the whole round in one graph."}
    note = " ".join(text for stage, text in together.items() if stage in stages and parts[stages[stage]].notna().any())
    columns = {"": "part", **stages, "round": "round_ms", "a prompt": "prefill_ms_per_request"}
    return table_of(parts, columns, "Stages, ms a round", note)


def experts_table(parts: pd.DataFrame) -> Table:
    """Return how many distinct experts a round read, by stage, and their bytes."""
    columns = {"": "part"}
    for unit, metric in (("experts", "experts_read"), ("bytes", "expert_bytes_read")):
        columns |= {f"{stage}, {unit}": f"{metric}.{stage}" for stage in EXPERTS}
    return table_of(parts, columns, "Experts read a round")


def latency_table(run: Run, base: str | None = None) -> Table:
    """Return vLLM's table: latencies in ms and throughputs, a column for each part, and the change from the base.

    Args:
        base: the part that others are compared with; None is plain decoding, or else the first reference.
    """
    base = base or ("plain" if "plain" in run.references else next(iter(run.references), THIS_RUN))
    order = [base, *(name for name in run.parts if name not in (base, THIS_RUN)), *([THIS_RUN] * (base != THIS_RUN))]
    rows = latency_rows([(name, run.parts[name]) for name in order])
    return rows_as_table(
        rows, f"Latency and throughput; changes from {base}" if len(order) > 1 else "Latency and throughput"
    )


def latency_rows(parts: Sequence[tuple[str, object]]) -> pd.DataFrame:
    """Return a row for each number of vLLM's table, a column for each part, and a column with each part's change in
    percent from the first."""
    rows = []
    for name, metric in _latency_names().items():
        values = {label: part[metric] for label, part in parts}  # type: ignore[index]
        first = next(iter(values.values()))
        changes = {
            f"{label} change": 100 * (value / first - 1) if value is not None and first else None
            for label, value in list(values.items())[1:]
        }
        rows.append({"number": name, "metric": metric, **values, **changes})
    return pd.DataFrame(rows)


def rows_as_table(rows: pd.DataFrame, title: str) -> Table:
    """Write the rows of `latency_rows`, each number by its own unit."""
    raw = rows.drop(columns="metric")
    shown = pd.DataFrame({"": raw["number"]})
    for name in raw.columns[1:]:
        pairs = zip(rows["metric"], raw[name], strict=True)
        shown[name] = [
            "-" if pd.isna(value) else f"{value:+.1f}%" if name.endswith(" change") else written(metric, value)
            for metric, value in pairs
        ]
    return Table(title, raw, shown)


def _latency_names() -> dict[str, str]:
    kinds = {"mean": "mean", "median": "p50", "P99": "p99"}
    latencies = {
        f"{name} {word}, ms": f"{metric}.{key}" for name, metric in LATENCIES.items() for word, key in kinds.items()
    }
    return {**latencies, **THROUGHPUTS}


def categories_table(run: Run) -> Table:
    """Return a run's categories, lowest first, then all together: length, rates by position, accuracy, what a lossy
    rule changes, and what each part of a drafter drafted."""
    rows = categories_frame(run)
    if rows.empty:
        return table_of(rows, {})
    rows = pd.concat([rows, pd.DataFrame([{"category": EVERY_CATEGORY, **run.metrics}])], ignore_index=True)
    rows["imposed"] = run.acceptance_imposed
    positions = {
        f"@{k}": f"acceptance_rate_by_position.unconditional.{k}" for k in range(1, (run.num_draft_tokens or 0) + 1)
    }
    parts = [name for name in rows if name.startswith("parts.") and name.endswith(".accepted")]
    lossy = {
        "thinking tokens": "thinking.mean_tokens",
        "TV a token": "distance.total_variation",
        "relaxed hits": "relaxed.hits",
        "equal to plain": "equal_to_plain",
    }
    columns = {
        "category": "category",
        "requests": "num_requests",
        "rounds": "rounds",
        "acceptance length": "acceptance_length",
        **positions,
        "accuracy": "accuracy",
        **(lossy if run.acceptance_lossless is False and not run.acceptance_imposed else {}),
        **{f"from {name.split('.')[1]}": name for name in parts},
    }
    return table_of(rows, columns, "Categories; @k: share of rounds that accept draft k")


def runs_table(runs: Sequence[Found]) -> Table:
    """Return a line for each run: what distinguishes it, its main numbers, how it ended, and its folder."""
    rows = own(frame(runs), finished=False)
    knobs = {name: name for name in varied(rows) if name not in SHOWN_ANYWAY}
    columns = {
        "#": "run",
        "drafter": "drafter",
        "prune": "prune",
        "rule": "acceptance",
        "K": "K",
        **knobs,
        **{head: name for head, name in SPEED.items() if head and not head.startswith(("end", "prompt"))},
        "status": "status",
        "folder": "folder",
    }
    notes = [IMPOSED] if rows["imposed"].any() else []
    notes += [
        f"#{number} {found.run.status}: {found.run.reason}." for number, found in enumerate(runs, 1) if found.run.reason
    ]
    return table_of(rows, columns, "Runs", " ".join(notes))
