"""Measures what verifying N rows costs beside one: the target's forward alone, on a CPU, the two taking turns.

    python benchmarks/verify_rows.py [kernels=torch]

A step of plain decoding is one row of every product; verifying K drafts is K + 1 rows of the same products, which a CPU
reads the same weights for. So the ratio says how much of a step is bound by bytes: 1 is all of it. Beside the products,
attention has N times the query rows, and it grows with the context. The figure is the least of many turns, so that a
machine that is busy now and then does not matter much.
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
    """Print a row a context, a column a number of rows, for a run with the overrides that were typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the run whose target it is")
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
    """Return the time, of the wall by default, of a forward with logits of `num_rows` rows behind `context` tokens."""
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
