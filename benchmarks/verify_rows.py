"""Measures what verifying N rows costs compared with one row: only the target's forward, on a CPU, in turns.

    python benchmarks/verify_rows.py [kernels=torch]

A step of plain decoding has one row in every product. Verifying K drafts has K + 1 rows in the same products, for which
a CPU reads the same weights. So the ratio shows how far a step is bound by reading weights; 1 means entirely. Besides
the products, attention has N times the query rows, and its cost grows with the context. The figure is the least of many
turns, so that a machine that is busy now and then does not matter much.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.selection import AllRows
from spec_lab.core.types import FeatureSpec
from spec_lab.engine.parts import Parts
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table

NUM_TURNS = 60
ROWS = (1, 2, 4, 8)
CONTEXTS = (64, 160, 320)


def main() -> None:
    """Print a line for each context and a column for each number of rows, for the target of a run with the typed
    overrides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the run whose target is timed")
    parts = load_parts(parser.parse_args().overrides)
    body = []
    for context in CONTEXTS:
        best = dict.fromkeys(ROWS, float("inf"))
        for _ in range(NUM_TURNS):
            for num_rows in ROWS:
                best[num_rows] = min(best[num_rows], seconds(parts, num_rows, context))
        ratios = [f"{best[num_rows] / best[1]:.2f}" for num_rows in ROWS[1:]]
        body.append([str(context), f"{1e3 * best[1]:.2f}", *ratios])
    print(format_table(["context", "one row, ms", *(f"{num_rows} rows" for num_rows in ROWS[1:])], body))


def load_parts(overrides: list[str]) -> Parts:
    """Load a target with the pages of one request."""
    sizes = ["drafter=none", "references=[]", "workload.limit=1", "cache.max_seq_len=400", "device=cpu"]
    config, _ = compose_run([*sizes, *overrides])
    parts = load_lab(choose(config)).engines[MAIN].parts
    parts.slots.table.assign(0, list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + CONTEXTS[-1] // 16 + 1)))
    return parts


@torch.inference_mode()
def seconds(parts: Parts, num_rows: int, context: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time (by default wall time) of a forward of `num_rows` rows after `context` tokens, with their
    logits."""
    started = clock()
    attention = parts.backend.build(
        positions=torch.arange(context, context + num_rows).unsqueeze(0),
        seq_lens=torch.tensor([context + num_rows]),
        page_table=parts.slots.table.pages[:1],
        max_seq_len=context + num_rows,
    )
    tokens = torch.full((num_rows,), 5)
    output = parts.target.forward(tokens, parts.cache, attention, AllRows(), FeatureSpec())
    parts.target.logits(output.hidden)
    return clock() - started


if __name__ == "__main__":
    sys.exit(guarded(main))
