"""Times rounds of targets with experts on one GPU, each beside its floor, and counts the experts they read.

    python benchmarks/moe_round.py outputs/moe_round                       all cells that are not in the table yet
    python benchmarks/moe_round.py outputs/moe_round --only "qwen3" "batch 1,"       cells whose name has all of these
    python benchmarks/moe_round.py outputs/moe_round --with graph.rounds_per_replay=4    cells with this override
    python benchmarks/moe_round.py outputs/moe_round --seconds 180         begin no cell after so many seconds
    python benchmarks/moe_round.py outputs/moe_round --dry-run             compose and check the cells, run nothing
    python benchmarks/moe_round.py outputs/moe_round --show                print the table, run nothing

All cells have bf16, random weights made on the device, and prompts of 512 random tokens. The cells of a target share
its weights and those of its drafter, in one process. The number of accepted drafts is imposed, the same in every round,
so that every round of a cell has all of its requests. Times are medians over a cell's rounds. Experts are the different
ones that a round reads, summed over layers and averaged over rounds. The floor counts these experts, and all other
weights once a pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter

from cell_checks import chosen, refused
from measured_rows import read_rows
from round_bench import Bench, Cell, Model, leaves_rounds_behind, missing_cells, run_cells

from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table

COLUMNS = (
    *("cell", "round ms", "floor ms", "verify ms", "catchup ms", "recur ms"),
    *("experts", "at random", "catchup experts", "recur experts", "prompt ms"),
)
SHOWN = (
    "cell",
    "round ms",
    "of floor",
    "verify",
    "of one row",
    "experts",
    "of one row's",
    "at random",
    "catchup",
    "experts",
)
QWEN3 = Model(
    "qwen3_30b_a3b",
    ("target=qwen3_30b_a3b",),
    ("drafter=eagle3", "drafter.weights=random", "drafter.draft_vocab_size=32000"),
)
APART = Model("qwen3_30b_a3b, random drafts", QWEN3.overrides, ("drafter=random",), catches_up=False)
"""Random drafts differ from each other, while a random EAGLE-3 head may draft the same token again and again. So they
show whether rows choose the same experts because they have the same tokens. A run would refuse graph=round without a
draft loop; here verify is timed."""
DENSE = Model("qwen3_4b", ("target=qwen3_4b",), QWEN3.drafter)
GLM = Model("glm4_7_flash", ("target=glm4_7_flash",))
DEEPSEEK = Model("deepseek_v3", ("target=deepseek_v3",))
BATCHES = (1, 16, 4, 64)
CELLS = (
    *(Cell(model, batch, K) for model, K, batch in product((QWEN3, GLM, DEEPSEEK, DENSE), (0, 3), BATCHES)),
    *(
        Cell(model, batch, 3, catchup)
        for model, catchup, batch in product((GLM, DEEPSEEK), ("none", "post_attention"), BATCHES)
    ),
    *(Cell(model, batch, K) for model, K, batch in product((QWEN3, GLM, DEEPSEEK), (1, 5), BATCHES)),
    *(Cell(APART, batch, K) for K, batch in product((0, 1, 3, 5), BATCHES)),
    *(
        Cell(model, batch, 7, catchup)
        for model, catchup, batch in product((GLM, DEEPSEEK), ("none", "post_attention", "pre_attention"), BATCHES)
    ),
)


def main(arguments: Sequence[str] | None = None, cells: Sequence[Cell] = CELLS) -> int:
    """Run the missing cells, and print the table. Return 2 if a cell was refused or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="cells whose name has all of these in it")
    parser.add_argument("--with", nargs="+", default=(), dest="changes", help="overrides of every cell")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later than this")
    parser.add_argument("--dry-run", action="store_true", help="compose and check, run nothing")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    table = options.folder / "moe_rounds.csv"
    cells = chosen([replace(cell, changes=tuple(options.changes)) for cell in cells], options.only)
    if options.dry_run:
        return refused(cells, leaves_rounds_behind)
    missing = missing_cells(cells, table)
    failed = False if options.show else run_cells(missing, table, perf_counter() + options.seconds, ExpertsBench)
    print(format_table(SHOWN, shown_rows(read_rows(table)), left=("cell",)))
    return 2 if failed else 0


class ExpertsBench(Bench):
    """Writes lines with the experts that a round reads."""

    def line(self, cell: Cell, result: GenerationResult, engine: Engine, requests: Sequence[Request]) -> dict[str, str]:
        timed = self.figures(cell, result)
        experts = timed.experts
        cells = (
            *(cell.name, f"{timed.round_ms:.3f}", f"{timed.floor_ms:.3f}"),
            *(f"{milliseconds:.3f}" for milliseconds in timed.stages.values()),
            *(f"{experts['verify']:.1f}", f"{self._at_random(cell):.1f}"),
            *(f"{experts['catchup']:.2f}", f"{experts['recur']:.2f}", f"{timed.prompt_ms:.1f}"),
        )
        return dict(zip(COLUMNS, cells, strict=True))

    def _at_random(self, cell: Cell) -> float:
        """Return how many experts verify would read if every row chose at random."""
        rows = cell.batch_size * (cell.num_draft_tokens + 1)
        sizes = [plan.experts for plan in self.models.target.config.layers if plan.experts is not None]
        return sum(size.num_experts * (1 - (1 - size.num_chosen / size.num_experts) ** rows) for size in sizes)


def shown_rows(rows: Sequence[dict[str, str]]) -> list[list[str]]:
    """Compare each cell with its floor, and its verify with plain decoding of the same batch."""
    plain = [row for row in rows if "no drafter" in row["cell"]]
    shown = []
    for row in rows:
        one_row = next((one for one in plain if is_one_row_of(one["cell"], row["cell"])), None)
        shown.append(
            [
                *(row["cell"], row["round ms"], ratio(row, row, "round ms", "floor ms")),
                *(row["verify ms"], ratio(row, one_row, "verify ms", "verify ms")),
                *(row["experts"], ratio(row, one_row, "experts", "experts"), row["at random"]),
                *(row["catchup ms"], row["catchup experts"]),
            ]
        )
    return shown


def is_one_row_of(plain: str, cell: str) -> bool:
    """Return whether a cell without drafter has the same target, batch and further overrides as another cell."""
    begin, _, changes = plain.partition("no drafter")
    rest = cell.removeprefix(begin).removesuffix(changes)
    has_changes = any("=" in part and not part.startswith("K=") for part in rest.split(", "))
    return cell.startswith(begin) and cell.endswith(changes) and not has_changes


def ratio(row: dict[str, str], other: dict[str, str] | None, name: str, of: str) -> str:
    """Return the ratio of two figures, or a dash if there is none."""
    if other is None or not float(other[of]):
        return "-"
    return f"{float(row[name]) / float(other[of]):.2f}"


if __name__ == "__main__":
    sys.exit(guarded(main))
