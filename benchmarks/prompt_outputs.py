"""Measures what a prompt pass costs with outputs for all rows and for the last row only: time, logits and memory.

    python benchmarks/prompt_outputs.py outputs/prompt_outputs --tokens 1024,8192,32768,130000 --chunks 512,8192 \
        target=llama3_8b target.weights=random device=cuda
    python benchmarks/prompt_outputs.py outputs/prompt_outputs --show --figure docs/log/prompts.png

`passes.csv` gets a line for each drafter, prune.prefill, prompt length and chunk size, as soon as it is measured. Lines
that it has already are not measured again. A pass ends with the first token and the first drafts. Its memory is the
peak above weights and caches. `logits MiB` is the largest tensor of logits; with all_rows it has every row of a chunk.
The first pass of each prompt length and chunk size in this process is not timed, since kernels are compiled and planned
in it.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measured_rows import append_row, read_rows
from prompt_passes import whole_numbers

from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import PruneConfig
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table
from spec_lab.wiring.drafting import load_drafter
from spec_lab.wiring.engine import build_engine
from spec_lab.wiring.limits import engine_limits
from spec_lab.wiring.models import load_models

DRAFTERS = ("none", "eagle3", "mtp_eagle")
MEBI, GIBI = 2**20, 2**30
LONGEST_REPEATED = 40_000
"""Prompts longer than this are timed once. For others the time is the median of three."""
NUM_REPEATS = 3
KEYS = ("drafter", "prefill", "tokens", "chunk")
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    drafter: str
    prefill: str
    tokens: int
    chunk: int

    @property
    def key(self) -> tuple[str, ...]:
        return self.drafter, self.prefill, str(self.tokens), str(self.chunk)


class WatchedLogits:
    """Wraps a target's `logits`, and keeps the size of the largest tensor that it returned."""

    def __init__(self, target: Any) -> None:
        self._logits = target.logits
        self.most_bytes = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._logits(hidden)
        self.most_bytes = max(self.most_bytes, logits.nbytes)
        return logits


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=whole_numbers, default=[1024, 8192, 32_768, 130_000])
    parser.add_argument("--chunks", type=whole_numbers, default=[512, 8192])
    parser.add_argument("--drafters", type=lambda names: names.split(","), default=list(DRAFTERS))
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--figure", type=Path, help="draw what is there")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    table = options.folder / "passes.csv"
    warm: set[tuple[int, int]] = set()
    if not options.show:
        there = {tuple(row[key] for key in KEYS) for row in read_rows(table)}
        for drafter in options.drafters:
            cells = [
                Cell(drafter, prefill, tokens, chunk)
                for tokens in options.tokens
                for chunk in options.chunks
                for prefill in ("last_row", "all_rows")
            ]
            if missing := [cell for cell in cells if cell.key not in there]:
                measure_drafter(missing, options.overrides, table, warm)
    show(read_rows(table))
    if options.figure is not None:
        draw(read_rows(table), options.figure)
    return 0


def measure_drafter(cells: Sequence[Cell], overrides: Sequence[str], table: Path, warm: set[tuple[int, int]]) -> None:
    """Load target and drafter once, and append a line for each cell. `warm` has the lengths and chunk sizes that have
    run."""
    drafter = cells[0].drafter
    typed = ["references=[]", "max_new_tokens=1", "graph=eager", "batch_size=1", f"drafter={drafter}"]
    if drafter != "none" and "target.weights=random" in overrides:
        typed.append("drafter.weights=random")
    config, _ = compose_run([*typed, *overrides])
    requests = [make_request(cell.tokens) for cell in cells]
    chosen = choose(config)
    limits = engine_limits(chosen, requests, config.drafter.num_draft_tokens)
    models = load_models(chosen, limits.max_seq_len)
    make_drafter = load_drafter(chosen, models.of_drafters)
    for prefill in ("last_row", "all_rows"):
        config = replace(config, prune=PruneConfig(prefill=prefill, catchup="none"))
        engine = build_engine(choose(config), models, make_drafter, limits)
        for cell, request in zip(cells, requests, strict=True):
            if cell.prefill == prefill:
                append_row(table, measured(cell, engine, request, warm))


def make_request(num_tokens: int) -> Request:
    """Make a prompt of random tokens, whose values do not affect the figures."""
    generator = random.Random(num_tokens)
    return Request(f"prompt of {num_tokens}", "random", tuple(generator.choices(range(3, 100), k=num_tokens)), 1)


def measured(cell: Cell, engine: Engine, request: Request, warm: set[tuple[int, int]]) -> Row:
    """Time the prompt's pass, and return its line. If kernels of its sizes have not run yet, run it once before."""
    engine.prompt_pass.chunk_size = cell.chunk
    if (cell.tokens, cell.chunk) not in warm:
        engine.generate([request])
        warm.add((cell.tokens, cell.chunk))
    # The parts of a replaced engine refer to each other, so its caches stay until a garbage collection. If that
    # happened during the pass, the pass would seem to take less memory than it does.
    gc.collect()
    target: Any = engine.parts.target
    watched, plain = WatchedLogits(target), target.logits
    target.logits = watched
    on_gpu = engine.parts.slots.kv_lens.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    num_repeats = NUM_REPEATS if cell.tokens <= LONGEST_REPEATED else 1
    records = [engine.generate([request]).prefills[0] for _ in range(num_repeats)]
    target.logits = plain
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    seconds = median(record.seconds for record in records)
    print(f"{' '.join(cell.key)}: {seconds:.4f} s", file=sys.stderr, flush=True)
    figures = {
        "seconds": f"{seconds:.6f}",
        "logit_rows": str(records[0].rows.prefill_logits),
        "logit_bytes": str(watched.most_bytes),
        "peak_bytes": str(peak) if on_gpu else "",
    }
    return dict(zip(KEYS, cell.key, strict=True)) | figures


def show(rows: Sequence[Row]) -> None:
    """Print a line for each cell, with its rate over that of no drafter with outputs for the last row only."""
    columns = ("drafter", "tokens", "chunk", "prefill", "ms", "tokens/s", "of no drafter's", "logits MiB", "pass MiB")
    body = [
        [
            *(row["drafter"], row["tokens"], row["chunk"], row["prefill"]),
            f"{1e3 * float(row['seconds']):.1f}",
            f"{tokens_per_second(row):,.0f}",
            relative(row, rows),
            f"{int(row['logit_bytes']) / MEBI:,.1f}",
            f"{int(row['peak_bytes']) / MEBI:,.0f}" if row["peak_bytes"] else "-",
        ]
        for row in sorted(rows, key=lambda row: (int(row["tokens"]), int(row["chunk"]), row["prefill"], row["drafter"]))
    ]
    print(format_table(columns, body, left=("drafter", "prefill")))


def tokens_per_second(row: Row) -> float:
    """Return prompt tokens divided by the time of the pass."""
    return int(row["tokens"]) / float(row["seconds"])


def relative(row: Row, rows: Sequence[Row]) -> str:
    """Return the rate over that of no drafter with outputs for the last row only; "-" if that is missing."""
    same = ("tokens", "chunk")
    for other in rows:
        if other["drafter"] == "none" and other["prefill"] == "last_row" and all(other[k] == row[k] for k in same):
            return f"{tokens_per_second(row) / tokens_per_second(other):.3f}"
    return "-"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw rates over no drafter's, and memory, against prompt length: a column of panels for each chunk size, a line
    for each drafter and prune.prefill."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns

    rate, memory = "prompt tokens/s over\nno drafter's last_row", "memory of a pass, GiB"
    found = []
    for row in rows:
        where = (int(row["tokens"]), int(row["chunk"]), row["drafter"], row["prefill"])
        if (share := relative(row, rows)) != "-":
            found.append((*where, rate, float(share)))
        if row["peak_bytes"]:
            found.append((*where, memory, int(row["peak_bytes"]) / GIBI))
    frame = pd.DataFrame(found, columns=["prompt tokens", "chunk", "drafter", "prune.prefill", "quantity", "value"])
    sns.set_theme(style="whitegrid", context="notebook")
    grid = sns.relplot(
        frame,
        x="prompt tokens",
        y="value",
        hue="drafter",
        style="prune.prefill",
        col="chunk",
        row="quantity",
        kind="line",
        markers=True,
        palette="colorblind",
        height=2.9,
        aspect=1.4,
        facet_kws={"sharey": "row", "margin_titles": True},
    )
    grid.set(xscale="log")
    grid.set_titles(col_template="chunks of {col_name}", row_template="")
    for quantity, axes in zip(grid.row_names, grid.axes, strict=True):
        axes[0].set_ylabel(quantity)
    grid.figure.subplots_adjust(hspace=0.15)
    grid.savefig(path, dpi=60, metadata={"Software": ""})
    plt.close(grid.figure)


if __name__ == "__main__":
    sys.exit(guarded(main))
