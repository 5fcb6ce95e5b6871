"""Times this lab and vLLM at the same shapes on one GPU, and prints ours over theirs.

    bash ../shared/peer/pack.sh                                       makes the packs that bring vLLM to the machine
    python benchmarks/peer.py FOLDER [--only "K=3" "batch 1,"]        ours: every cell is a run of the lab
    python peer_vllm.py ... --out FOLDER/theirs-NAME.json             theirs: NAME contains vLLM's name of the target
    python benchmarks/peer.py FOLDER --show                           the table of both

All cells have bf16, random weights, prompts of 512 tokens, and an imposed acceptance length of 2.5 at K=3. "prompt" is
the milliseconds of a request's prompt pass. vLLM's is timed as the generation of one token. All figures are medians
over turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from cell_checks import chosen, refused
from h200_round import Cell
from measured_rows import read_rows, run_missing

import spec_lab
from spec_lab.core.ending import ended

NAMES = {"llama3_8b": "llama8b", "qwen3_30b_a3b": "qwen3_30b_a3b", "glm4_7_flash": "glm4_7_flash"}
"""vLLM's names of the shapes, by the lab's."""
OUTPUTS = {"llama3_8b": 512, "qwen3_30b_a3b": 256, "glm4_7_flash": 256}
PLAIN = ("glm4_7_flash",)
"""vLLM has no EAGLE-3 for these targets."""
CELLS = tuple(
    Cell(K, length, batch, max_new_tokens=OUTPUTS[target], target=target)
    for target in NAMES
    for K, length in ((0, 1.0), (3, 2.5))
    for batch in (1, 16, 64)
    if not K or target not in PLAIN
)
HEADERS = ("cell", "prompt, theirs", "ours", "theirs over ours", "decode tok/s, theirs", "ours", "ours over theirs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lab's missing cells, and print the table. Return 2 if a cell was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=(), help="cells whose name has all of these in it")
    parser.add_argument("--dry-run", action="store_true", help="compose and check, run nothing")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    table = options.folder / "ours.csv"
    cells = chosen(CELLS, options.only)
    if options.dry_run:
        return refused(cells)
    failed = not options.show and run_missing(cells, table, lambda cell: measured(cell, options.folder))
    import pandas as pd

    print(pd.DataFrame(lines(cells, table, options.folder), columns=HEADERS).to_string(index=False))
    return 2 if failed else 0


def measured(cell: Cell, folder: Path) -> dict[str, str]:
    """Run a cell, and return its line."""
    print(f"-- {cell.name}", file=sys.stderr)
    run = spec_lab.run(
        spec_lab.compose([*cell.overrides(), "repeats=3", "profile_rounds=0", f"output_dir={folder}"])
    ).run
    times = (run["prefill_ms_per_request"], run["decode_tokens_per_second"])
    return dict(zip(("cell", "prompt ms", "decode tok/s"), (cell.name, *map(str, times)), strict=True))


def lines(cells: Sequence[Cell], table: Path, folder: Path) -> list[list[str]]:
    """Return a line for each cell, with the figures that are known of either side."""
    ours = {row["cell"]: (float(row["prompt ms"]), float(row["decode tok/s"])) for row in read_rows(table)}
    found = []
    for cell in cells:
        prompt, decode = ours.get(cell.name, (None, None))
        their_prompt, their_decode = theirs(cell, folder)
        found.append(
            [
                cell.name,
                *(_text(value, 1) for value in (their_prompt, prompt)),
                _text(_ratio(their_prompt, prompt), 2),
                *(_text(value, 0) for value in (their_decode, decode)),
                _text(_ratio(decode, their_decode), 2),
            ]
        )
    return found


def theirs(cell: Cell, folder: Path) -> tuple[float | None, float | None]:
    """Return vLLM's milliseconds a prompt and tokens a second at a cell's shape, as medians over turns; None if it has
    none."""
    target = NAMES[cell.target]
    files = [file for file in folder.glob("theirs-*.json") if target in file.name]
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    shape = cell.batch_size, cell.prompt_tokens, cell.num_draft_tokens
    same = [row for row in rows if (row["bs"], row["inlen"], row["spec"]) == shape]
    same = [row for row in same if not cell.num_draft_tokens or row["acc"] == cell.mean_length]
    if not same:
        return None, None
    prompts = [1e3 * row["prefill_s"] / row["bs"] for row in same]
    return statistics.median(prompts), statistics.median(row["decode_tps"] for row in same)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(ended(main))
