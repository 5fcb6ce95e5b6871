"""Times rounds at the Llama-3.1-8B shape on one GPU, each beside its floor (docs/log/rounds_8b.md).

    python benchmarks/h200_round.py outputs/h200_round                 all cells that are not in the table yet
    python benchmarks/h200_round.py outputs/h200_round --only "K=3"    cells whose name has it in it
    python benchmarks/h200_round.py outputs/h200_round --with graph.rounds_per_replay=4    cells with this override
    python benchmarks/h200_round.py outputs/h200_round --dry-run       compose and check the cells, run nothing
    python benchmarks/h200_round.py outputs/h200_round --show          print the table, run nothing

All cells have bf16 and random weights. Cells with drafts have an EAGLE-3 head with a draft vocabulary of 32 000 tokens,
and imposed acceptance. Each cell is an ordinary run with its own record. Its line is added to `rounds.csv` as soon as
it has finished.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import floor
from cell_checks import chosen, refused
from measured_rows import read_rows, run_missing

import spec_lab
from spec_lab.checkpoints.eagle3_checkpoint import eagle3_tensor_shapes
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.random_weights import random_eagle3_config
from spec_lab.core.ending import ended
from spec_lab.record.wording import number

if TYPE_CHECKING:
    from spec_lab.record.models import Run

SHAPES = Path(spec_lab.__file__).parent / "checkpoints" / "shapes"
DRAFT_VOCAB_SIZE = 32_000
COLUMNS = (
    *("cell", "ms a round", "acceptance length", "floor ms", "share", "nodes", "prompt pass ms", "prompt floor ms"),
    "folder",
)
COMMON = (
    "target.weights=random",
    "workload=random_ids",
    "attention=triton",
    "kernels=triton",
    "graph=round",
    "device=cuda",
    "references=[]",
    "warmup_requests=1",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table; `num_draft_tokens` of 0 is plain decoding."""

    num_draft_tokens: int
    mean_length: float
    batch_size: int
    prompt_tokens: int = 512
    max_new_tokens: int = 128
    target: str = "llama3_8b"
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        drafts = f"K={self.num_draft_tokens}, AL {self.mean_length}" if self.num_draft_tokens else "no drafter"
        sizes = f"batch {self.batch_size}, {self.prompt_tokens} in, {self.max_new_tokens} out"
        return ", ".join((self.target, drafts, sizes, *self.changes))

    def overrides(self) -> list[str]:
        """Return the overrides of the cell's run."""
        drafter = ["drafter=none", "prune=prefill"]  # outputs for the last prompt row alone, as engines compute them
        if self.num_draft_tokens:
            drafter = [
                "drafter=eagle3",
                "drafter.weights=random",
                f"drafter.draft_vocab_size={DRAFT_VOCAB_SIZE}",
                f"drafter.num_draft_tokens={self.num_draft_tokens}",
                "prune=catchup",
                "acceptance=synthetic",
                f"acceptance.mean_length={self.mean_length}",
            ]
        return [
            f"target={self.target}",
            *COMMON,
            *drafter,
            f"batch_size={self.batch_size}",
            f"workload.num_requests={self.batch_size}",
            f"workload.prompt_tokens={self.prompt_tokens}",
            f"max_new_tokens={self.max_new_tokens}",
            *self.changes,
        ]

    def floor_ms(self) -> float:
        """Return the floor of a round in the middle of the output."""
        config = read_model_config(SHAPES / self.target)
        seq_len = self.prompt_tokens + self.max_new_tokens / 2
        is_fp8 = "target.weight_dtype=fp8" in self.changes
        works = [floor.target_work(config, self.batch_size, self.num_draft_tokens + 1, seq_len, is_fp8=is_fp8)]
        if self.num_draft_tokens:
            shapes = eagle3_tensor_shapes(random_eagle3_config(config, DRAFT_VOCAB_SIZE))
            works += floor.draft_work(config, shapes, self.num_draft_tokens, self.batch_size, seq_len)
        return 1e3 * sum(work.seconds for work in works)

    def prompt_floor_ms(self) -> float:
        """Return the floor of a request's prompt pass, where prompts come one at a time."""
        return 1e3 * floor.prompt_work(read_model_config(SHAPES / self.target), self.prompt_tokens).seconds


CELLS = (
    *(Cell(0, 1.0, batch_size) for batch_size in (1, 16, 64)),
    *(Cell(3, 2.5, batch_size) for batch_size in (1, 16, 64)),
    Cell(5, 3.5, 1),
    *(Cell(3, 2.5, batch_size, max_new_tokens=512) for batch_size in (1, 16, 64)),
    *(Cell(3, 2.5, 1, prompt_tokens) for prompt_tokens in (32_000, 120_000)),
    *(Cell(K, length, batch, 64_000) for K, length in ((0, 1.0), (3, 2.5)) for batch in (4, 8)),
    Cell(0, 1.0, 4, 120_000),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing cells, and print the table. Return 2 if a cell was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=(), help="cells whose name has all of these in it")
    parser.add_argument("--with", nargs="*", default=(), dest="changes", help="overrides of every cell")
    parser.add_argument("--dry-run", action="store_true", help="compose and check, run nothing")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    table = options.folder / "rounds.csv"
    cells = chosen([replace(cell, changes=tuple(options.changes)) for cell in CELLS], options.only)
    if options.dry_run:
        return refused(cells)
    failed = not options.show and run_missing(cells, table, lambda cell: measured(cell, options.folder))
    import pandas as pd

    rows = read_rows(table)
    print(pd.DataFrame(rows, columns=COLUMNS[:-1]).to_string(index=False))
    return 2 if failed else 0


def measured(cell: Cell, folder: Path) -> dict[str, str]:
    """Run a cell, and return its line."""
    print(f"-- {cell.name}, floor {cell.floor_ms():.2f} ms", file=sys.stderr)
    result = spec_lab.run(spec_lab.compose([*cell.overrides(), f"output_dir={folder}"]))
    return line(cell, result.run, str(result.folder))


def line(cell: Cell, run: Run, folder: str) -> dict[str, str]:
    """Turn the record of a cell into its line of the table."""
    round_ms, floor_ms = run["round_ms"], cell.floor_ms()
    cells = (
        cell.name,
        f"{round_ms:.2f}",
        number(run["acceptance_length"]),
        f"{floor_ms:.2f}",
        f"{100 * floor_ms / round_ms:.0f} %",
        str(sum(run.under("graph.nodes").values())),
        f"{run['prefill_ms_per_request']:.1f}",
        f"{cell.prompt_floor_ms():.1f}",
        folder,
    )
    return dict(zip(COLUMNS, cells, strict=True))


if __name__ == "__main__":
    sys.exit(ended(main))
