"""Times rounds of Gemma 4 with its assistant and of Qwen3.5 with its MTP module on one GPU, each beside its floor.

    python benchmarks/family_round.py outputs/family_round                    all cells that are not in the table yet
    python benchmarks/family_round.py outputs/family_round --only "9b" "K=3"  cells whose name has all of these in it
    python benchmarks/family_round.py outputs/family_round --seconds 180      begin no cell after so many seconds
    python benchmarks/family_round.py outputs/family_round --profile          also launches, and the GPU's idle time
    python benchmarks/family_round.py outputs/family_round --show             print the table, run nothing

A cell is a target with a batch size, K and graph mode. All cells have bf16, random weights, and prompts of 512 random
tokens. The cells of a target share its weights. The number of accepted drafts is imposed, the same in every round, as
in `moe_round.py`.

The floor also counts what these families move besides weights and keys: the embedding rows that each layer gathers, and
the states of delta nets. For each request and net, one state is read and one is written for each verified row. With
`recurrent.rollback=replay` one state is written, and the rows themselves are read and written.

`launch ms` is the time in which the host launches a round, and `nodes` counts the nodes of its graphs. If launching
takes longer than the round's work, the GPU waits. With --profile some more rounds of a cell run under the profiler. The
GPU's idle time is the time of a round without the profiler, less the time in which a kernel runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import floor
from cell_checks import chosen
from measured_rows import read_rows
from round_bench import LEFT_OUT, NUM_ROUNDS, Bench, Cell, Model, missing_cells, run_cells

from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.profiling import profile_rounds
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table

COLUMNS = (
    *("cell", "round ms", "floor ms", "of floor", "verify ms", "catchup ms", "recur ms", "launch ms"),
    *("nodes", "prompt ms", "launches", "replays", "idle ms"),
)
NUM_PROFILED = 8
ASSISTANT = ("drafter=frozen_kv", "drafter.weights=random")
GEMMA_31B, GEMMA_E4B = (Model(name, (f"target={name}",), ASSISTANT) for name in ("gemma4_31b", "gemma4_e4b"))
QWEN_9B, QWEN_35B = (Model(name, (f"target={name}",)) for name in ("qwen3_5_9b", "qwen3_5_35b_a3b"))
BATCHES = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class FamilyCell(Cell):
    """One line of the table."""

    graph: str = "round"
    rollback: str = "checkpoints"

    @property
    def name(self) -> str:
        drafts = f"K={self.num_draft_tokens}" if self.num_draft_tokens else "no drafter"
        rollback = ", replay" if self.rollback == "replay" else ""
        return f"{self.model.name}, batch {self.batch_size}, {drafts}, {self.graph}{rollback}"

    def overrides(self) -> list[str]:
        """Return the overrides of the cell's run."""
        kept = [item for item in Cell.overrides(self) if not item.startswith("graph=")]
        return [f"graph={self.graph}", *kept, f"recurrent.rollback={self.rollback}"]


CELLS = (
    *(FamilyCell(QWEN_9B, batch, 3, rollback=kept) for batch, kept in product(BATCHES, ("checkpoints", "replay"))),
    *(
        FamilyCell(QWEN_9B, batch, K, rollback=kept)
        for K, batch, kept in product((1, 7), BATCHES, ("checkpoints", "replay"))
    ),
    *(FamilyCell(QWEN_9B, batch, 0) for batch in BATCHES),
    *(
        FamilyCell(GEMMA_E4B, batch, 3, graph=mode)
        for batch, mode in product(BATCHES, ("round", "split_seed", "full_loop"))
    ),
    *(FamilyCell(GEMMA_E4B, batch, 0) for batch in BATCHES),
    *(FamilyCell(GEMMA_31B, batch, 3) for batch in BATCHES),
    *(FamilyCell(GEMMA_31B, batch, 3, graph=mode) for batch, mode in product(BATCHES, ("split_seed", "full_loop"))),
    *(FamilyCell(QWEN_35B, batch, 3, rollback=kept) for kept, batch in product(("checkpoints", "replay"), BATCHES)),
)


def main(arguments: Sequence[str] | None = None, cells: Sequence[Cell] = CELLS) -> int:
    """Run the missing cells, and print the table. Return 2 if a cell was refused or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="cells whose name has all of these in it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later than this")
    parser.add_argument("--profile", action="store_true", help="count launches and the GPU's idle time")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    table = options.folder / "family_rounds.csv"
    missing = missing_cells(chosen(cells, options.only), table)
    deadline = perf_counter() + options.seconds
    bench = ProfilingBench if options.profile else FamilyBench
    failed = False if options.show else run_cells(missing, table, deadline, bench)
    print(format_table(COLUMNS, [[row[name] for name in COLUMNS] for row in read_rows(table)], left=("cell",)))
    return 2 if failed else 0


class FamilyBench(Bench):
    """Writes lines with the host's launch time and the graph nodes."""

    def line(self, cell: Cell, result: GenerationResult, engine: Engine, requests: Sequence[Request]) -> dict[str, str]:
        timed = self.figures(cell, result)
        launch_seconds = median(one.launch_seconds or 0.0 for one in result.rounds[LEFT_OUT:])
        cells = (
            *(cell.name, f"{timed.round_ms:.3f}", f"{timed.floor_ms:.3f}", f"{timed.round_ms / timed.floor_ms:.2f}"),
            *(f"{milliseconds:.3f}" for milliseconds in timed.stages.values()),
            *(f"{1e3 * launch_seconds:.3f}", str(sum(count or 0 for count in result.graph.nodes.values()))),
            *(f"{timed.prompt_ms:.1f}", "-", "-", "-"),
        )
        return dict(zip(COLUMNS, cells, strict=True))

    def works(self, cell: Cell, experts: dict[str, float]) -> list[floor.Work]:
        first, *drafting = Bench.works(self, cell, experts)
        if cell.rollback != "replay":  # type: ignore[attr-defined]
            return [first, *drafting]
        seq_len = cell.model.prompt_tokens + cell.num_emitted * NUM_ROUNDS / 2
        return [
            floor.target_work(
                self.models.target.config,
                cell.batch_size,
                cell.num_draft_tokens + 1,
                seq_len,
                experts["verify"],
                replays=True,
            ),
            *drafting,
        ]


class ProfilingBench(FamilyBench):
    """Profiles some more rounds of each cell once it is timed."""

    def line(self, cell: Cell, result: GenerationResult, engine: Engine, requests: Sequence[Request]) -> dict[str, str]:
        line = super().line(cell, result, engine, requests)
        with TemporaryDirectory() as folder:
            work = profile_rounds(engine, list(requests), NUM_PROFILED, Path(folder)).work
        if work is None:
            return line
        busy_ms = work["gpu_busy_ms_per_round"]
        idle = "-" if busy_ms is None else f"{float(line['round ms']) - busy_ms:.3f}"
        counted = (f"{work['launches_per_round']:.0f}", f"{work['replays_per_round']:.0f}", idle)
        return line | dict(zip(("launches", "replays", "idle ms"), counted, strict=True))


if __name__ == "__main__":
    sys.exit(guarded(main))
