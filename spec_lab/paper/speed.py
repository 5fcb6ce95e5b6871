"""The tables of speed: tokens per second per user and per GPU, with the best fixed K at every point; and stage
times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_lab.paper.provenance import NONE
from spec_lab.paper.runs import PaperRun
from spec_lab.paper.table import PaperTable, TableColumn, TableRow, Value, table_of
from spec_lab.record.averages import ratio
from spec_lab.record.paired import over_reference
from spec_lab.record.time_metrics import STAGES, draft_ms

PLAIN = "plain decoding"
LINE = TableColumn("line", "line")
BATCH = TableColumn("batch_size", "batch", 0)
K = TableColumn("draft_tokens", "K", 0)
MILLISECONDS = 1000.0


def frontier_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return a row for each line, batch size and K, and one for plain decoding at batch sizes where it was measured."""
    speed = [run for run in runs if run.cell.part == "speed"]
    best = _best(speed)
    rows = [*_plain_rows(speed), *(_row(run, best.get(_point(run)) is run) for run in speed)]
    rows.sort(key=lambda row: int(row.values["batch_size"] or 0))  # plain decoding is first within a batch size
    columns = [
        BATCH,
        LINE,
        K,
        TableColumn("user", "tok/s a user", 1),
        TableColumn("gpu", "tok/s a GPU", 1),
        TableColumn("speedup", "speedup", 2, interval=True),
        TableColumn("best", "best K"),
    ]
    note = (
        "Tok/s a user: tokens of a request round over the time of a round. "
        "Tok/s a GPU: decode rate of the whole batch over the number of GPUs; on a CPU, of the machine. "
        "Speedup: over plain decoding, which took turns with the run, with its 95 % interval over turns. "
        "Plain decoding's rows are of the first run at their batch size. Best K: the K with the highest "
        "speedup at its line and batch size."
    )
    return table_of("frontier", "Tokens a second by batch size", columns, _NAMES, rows, note)


def stage_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return the stage times of a round in the same runs."""
    speed = [run for run in runs if run.cell.part == "speed"]
    known = [stage for stage in STAGES if any(_stages(run.summary).get(stage) is not None for run in speed)]
    columns = [
        *(BATCH, LINE, K, TableColumn("round", "round", 3)),
        *(TableColumn(stage, stage, 3) for stage in known),
        TableColumn("rest", "between", 3),
        TableColumn("share", "drafter's share", 3),
    ]
    rows = [TableRow({**_named(run), **_stage_values(run.summary, known)}, run.provenance) for run in speed]
    note = (
        "Milliseconds of a round: the median over turns of a turn's mean. Between: the time outside all stages. "
        "Drafter's share: the share of the round that the drafter's stages take together."
    )
    return table_of("stages", "Stage times", columns, _NAMES, rows, note)


_NAMES = ("batch_size", "line", "draft_tokens")


def _named(run: PaperRun) -> dict[str, Value]:
    return {"line": run.cell.line, "batch_size": run.cell.batch_size, "draft_tokens": run.num_draft_tokens}


def _point(run: PaperRun) -> tuple[str, int | None]:
    return run.cell.line, run.cell.batch_size


def _best(runs: Sequence[PaperRun]) -> dict[tuple[str, int | None], PaperRun]:
    """Find the K with the highest speedup at each point, or the highest decode rate of runs without plain decoding. In
    a speedup, changes of the machine between runs cancel out."""
    best: dict[tuple[str, int | None], PaperRun] = {}
    for run in runs:
        known = best.get(_point(run))
        if known is None or _gain(run) > _gain(known):
            best[_point(run)] = run
    return best


def _gain(run: PaperRun) -> float:
    gained = over_reference(run.summary, run.summary, "plain")
    return (run.summary["decode_tokens_per_second"] or 0.0) if gained is None else gained.value


def _row(run: PaperRun, is_best: bool) -> TableRow:
    gained = over_reference(run.summary, run.summary, "plain")
    low, high = (None, None) if gained is None else gained.ends
    values: dict[str, Value] = {
        **_named(run),
        **_rates(run.summary, run.summary),
        "speedup": None if gained is None else gained.value,
        "speedup_low": low,
        "speedup_high": high,
        "best": "yes" if is_best else "",
    }
    return TableRow(values, run.provenance)


def _plain_rows(runs: Sequence[PaperRun]) -> list[TableRow]:
    """Take plain decoding at each batch size from the first run that has it as a reference."""
    first: dict[int | None, PaperRun] = {}
    for run in runs:
        if "plain" in run.summary["references"]:
            first.setdefault(run.cell.batch_size, run)
    rows = []
    for batch_size, run in first.items():
        values: dict[str, Value] = {"line": PLAIN, "batch_size": batch_size, "draft_tokens": 0, "best": ""}
        own = {"K": "0", "drafter": NONE, "rule": NONE, "prune": NONE, "tree": NONE}
        plain = run.summary["references"]["plain"]
        rows.append(TableRow({**values, **_rates(plain, run.summary), "speedup": 1.0}, {**run.provenance, **own}))
    return rows


def _rates(part: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Value]:
    rounds, round_ms = part["rounds"], part["round_ms"]
    tokens = ratio(part["emitted_tokens"], rounds)
    decoded = part["decode_tokens_per_second"]
    return {
        "user": tokens / round_ms * MILLISECONDS if tokens is not None and round_ms else None,
        "gpu": None if decoded is None else decoded / (summary.get("world_size") or 1),
    }


def _stages(summary: Mapping[str, Any]) -> Mapping[str, float | None]:
    return summary["stage_ms_per_round"]


def _stage_values(summary: Any, known: Sequence[str]) -> dict[str, Value]:
    stages, round_ms, drafter = _stages(summary), summary["round_ms"], draft_ms(summary)
    timed = sum(stages.get(stage) or 0.0 for stage in known)
    return {
        "round": round_ms,
        **{stage: stages.get(stage) for stage in known},
        "rest": None if round_ms is None else round_ms - timed,
        "share": drafter / round_ms if drafter is not None and round_ms else None,
    }
