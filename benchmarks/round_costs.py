"""Times rounds for several K, batch sizes, contexts and prunings of the catch-up step, without computing the prompts.

    python benchmarks/round_costs.py outputs/round_costs --prompts 1024,8192 --batches 1,8,64,256 --drafts 0,1,3,7 \
        target=llama3_8b target.weights=random drafter.draft_vocab_size=32000 device=cuda
    python benchmarks/round_costs.py outputs/blocks --prompts 512 --catchup none,pre_attention drafter=dflash \
        drafter.weights=random graph=eager
    python benchmarks/round_costs.py outputs/round_costs --show

The cost of a round does not depend on the values of its keys. So caches are filled with noise in place of prompt
passes: 64 prompts of 8192 tokens would take 14 s in every cell. Everything else is the engine's own round, with the
engine's own times. The drafter is an EAGLE-3 head, or the one named. Every round emits two tokens for each request,
which is imposed, so that all requests end together. `--drafts 0` is plain decoding. For a block drafter the table has
the bytes that writing its context moves: the weights once, and for each row the target's hidden states, the context,
and its keys and values.

`rounds.csv` gets a line for each cell as soon as it is measured. Cells that it has already are not measured again. A
cell that is refused, such as one that does not fit the GPU, is named and left out.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from measured_rows import append_row, read_rows
from prompt_passes import whole_numbers

from spec_lab.core.errors import UserError
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.prompts import LiveRows, PromptEnds
from spec_lab.core.results import RoundRecord, RowCounts
from spec_lab.core.types import Request
from spec_lab.core.types import Sequence as RunningSequence
from spec_lab.engine import timing
from spec_lab.engine.engine import Engine
from spec_lab.engine.prefill import PromptPass
from spec_lab.measure.profiling import profile_rounds
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import PruneConfig, RunConfig
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table
from spec_lab.wiring.drafting import load_drafter
from spec_lab.wiring.engine import build_engine
from spec_lab.wiring.limits import engine_limits
from spec_lab.wiring.models import TargetBuild, load_models

KEYS = ("tokens", "batch", "K", "pruned")
NOT_PRUNED = "none"
CATCHUPS = (NOT_PRUNED, "post_attention", "pre_attention")
EMITTED_PER_ROUND = 2
NUM_SETTLING = 3
"""The first rounds of a pass, which are not counted. The very first is timed from its launch, and the next ones are not
yet in a steady state."""
PROFILED_ROUNDS = 8
STAGES = ("verify", "catchup", "recur")
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table; `num_drafts` of 0 is plain decoding."""

    tokens: int
    batch: int
    num_drafts: int
    catchup: str

    @property
    def key(self) -> tuple[str, ...]:
        return str(self.tokens), str(self.batch), str(self.num_drafts), self.catchup

    @property
    def emitted(self) -> int:
        """Tokens that a round of a request emits."""
        return EMITTED_PER_ROUND if self.num_drafts else 1


class FilledPrompts(PromptPass):
    """Replaces prompt passes: it prepares a request's slot, and computes nothing."""

    def run(self, sequences: Iterable[RunningSequence]) -> dict[int, RowCounts]:
        """Give every request a first token and first drafts."""
        ordered, slots = list(sequences), self._parts.slots
        device = slots.kv_lens.device
        lengths = [len(sequence.request.prompt_ids) for sequence in ordered]
        ids, kv_lens, tokens = torch.tensor(
            [[sequence.slot for sequence in ordered], lengths, [1] * len(ordered)], device=device
        ).unbind(0)
        rows = LiveRows(ids, self._parts.backend.build(kv_lens.unsqueeze(1), kv_lens, slots.table.pages[ids], 1))
        num_drafts = self._parts.drafter.num_draft_tokens
        slots.start(PromptEnds(ids, kv_lens, tokens, rows, max(lengths)), ids.new_ones(len(ordered), num_drafts))
        for sequence, length in zip(ordered, lengths, strict=True):
            sequence.num_prefilled = sequence.kv_len = length
            sequence.tokens.append(1)
        return {sequence.slot: RowCounts() for sequence in ordered}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=whole_numbers, default=[1024, 8192])
    parser.add_argument("--batches", type=whole_numbers, default=[1, 8, 64, 256])
    parser.add_argument("--drafts", type=whole_numbers, default=[0, 1, 3, 7])
    parser.add_argument("--catchup", type=lambda names: names.split(","), default=list(CATCHUPS))
    parser.add_argument("--rounds", type=int, default=24, help="timed rounds of a pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="time stages by the CPU time of this process")
    parser.add_argument("--gathers", action="store_true", help="profile a few rounds for kernels that gather rows")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    table = options.folder / "rounds.csv"
    for tokens in [] if options.show else options.prompts:
        there = {tuple(row[key] for key in KEYS) for row in read_rows(table)}
        if missing := [cell for cell in cells_of(options, tokens) if cell.key not in there]:
            # If other programs run on the machine, wall time says little about the work of a CPU.
            clock = patch.object(timing, "perf_counter", process_time) if options.cpu_time else nullcontext()
            with clock:
                measure_prompt(missing, options, table)
    show(read_rows(table))
    return 0


def cells_of(options: argparse.Namespace, tokens: int) -> list[Cell]:
    """List the cells with prompts of `tokens`. Plain decoding has no catch-up step to prune."""
    return [
        Cell(tokens, batch, num_drafts, catchup)
        for batch in options.batches
        for num_drafts in options.drafts
        for catchup in (options.catchup if num_drafts else [NOT_PRUNED])
    ]


def measure_prompt(cells: Sequence[Cell], options: argparse.Namespace, table: Path) -> None:
    """Load the target for prompts of one length, and append a line for each cell. How attention splits keys depends on
    the longest sequence, so each prompt length loads the target again."""
    num_new = 1 + EMITTED_PER_ROUND * (options.rounds + NUM_SETTLING)
    most_drafts = max(max(options.drafts), 1)
    config = composed(options.overrides, most_drafts)
    longest = [make_request(0, cells[0].tokens, num_new)]
    chosen = choose(config)
    models = load_models(chosen, engine_limits(chosen, longest, most_drafts).max_seq_len)
    for cell in cells:
        try:
            row = measured(cell, options, models)
        except UserError as error:
            print(f"{' '.join(cell.key)}: {error}", file=sys.stderr)
        else:
            append_row(table, row)
        gc.collect()  # graphs and caches of an engine refer to one another
        if models.device.type == "cuda":
            torch.cuda.empty_cache()


def composed(overrides: Sequence[str], num_drafts: int) -> RunConfig:
    """Compose a run with `num_drafts` drafts in a round, or with no drafter if that is 0."""
    chosen = ["references=[]", "graph=round"]
    if num_drafts:
        chosen += ["drafter=eagle3", f"drafter.num_draft_tokens={num_drafts}", "acceptance=synthetic"]
        chosen.append(f"acceptance.mean_length={EMITTED_PER_ROUND}")
        if "target.weights=random" in overrides:
            chosen.append("drafter.weights=random")
    else:
        chosen.append("drafter=none")
        overrides = [override for override in overrides if not override.startswith(("drafter.", "drafter="))]
    config, _ = compose_run([*chosen, *overrides])
    return config


def make_request(number: int, num_tokens: int, num_new: int) -> Request:
    """Make a request whose token values do not affect the times."""
    return Request(f"request {number}", "noise", (1,) * num_tokens, num_new, ignore_eos=True)


def measured(cell: Cell, options: argparse.Namespace, models: TargetBuild) -> Row:
    """Build the cell's engine, run it, and return its line."""
    config = replace(composed(options.overrides, cell.num_drafts), batch_size=cell.batch)
    prune = PruneConfig(prefill="last_row", catchup=cell.catchup)
    num_new = 1 + cell.emitted * (options.rounds + NUM_SETTLING)
    requests = [make_request(number, cell.tokens, num_new) for number in range(cell.batch)]
    chosen = choose(config)
    limits = engine_limits(chosen, requests, cell.num_drafts)
    make_drafter = load_drafter(chosen, models.of_drafters)
    engine = build_engine(chosen.again(replace(config, prune=prune)), models, make_drafter, limits)
    fill(engine)
    engine.prompt_pass = FilledPrompts(engine.round, engine.prune, cell.tokens, cell.tokens * cell.batch)
    engine.generate(requests)  # captures
    passes = [engine.generate(requests).rounds[NUM_SETTLING:] for _ in range(options.passes)]
    figures = line(passes)
    if options.gathers:
        with TemporaryDirectory() as folder:
            profile = profile_rounds(engine, requests, PROFILED_ROUNDS, Path(folder))
        figures["gathers_us"] = f"{sum(k['us_per_round'] for k in profile.kernels if gathers_rows(k['name'])):.3f}"
    figures["context_bytes"] = context_bytes(engine, int(figures["catchup_rows"]))
    figures["nodes"] = str(sum(count or 0 for count in engine.graph.counts.nodes.values()))
    row = dict(zip(KEYS, cell.key, strict=True)) | figures
    print(" ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr, flush=True)
    return row


def fill(engine: Engine) -> None:
    """Fill the pages of target and drafter with noise. The reserved pages, which hold no position, stay zero."""
    first = NUM_RESERVED_PAGES * engine.parts.slots.table.page_size
    drafter: Any = engine.parts.drafter
    own = [drafter.cache.kv] if engine.num_draft_tokens else []
    for layer in [*own, *(layer for tensor in engine.parts.cache.tensors for layer in tensor)]:
        layer[first:].normal_()


def context_bytes(engine: Engine, num_rows: int) -> str:
    """Return the bytes that writing the context of `num_rows` rows moves; "" if no context is written."""
    drafter: Any = engine.parts.drafter
    config = getattr(getattr(getattr(drafter, "blocks", None), "model", None), "config", None)
    if config is None or not num_rows:
        return ""
    plan, hidden = config.body.layers[0], config.body.hidden_size
    features = len(config.taps) * config.target_hidden_size
    heads = 2 * len(config.body.layers) * plan.num_kv_heads * plan.head_dim
    numbers = hidden * (features + heads) + num_rows * (features + 2 * hidden + heads)
    return str(numbers * drafter.cache.kv.element_size())


def gathers_rows(kernel: str) -> bool:
    """Return whether a kernel of torch picks rows by index, judging by its name."""
    return any(word in kernel.lower() for word in ("gather", "index_elementwise", "indexselect", "index_select"))


def line(passes: Sequence[Sequence[RoundRecord]]) -> Row:
    """Return the medians over passes of the mean round and its stages, with the range of the round."""
    rounds = [1e3 * mean(record.seconds for record in records) for records in passes]
    figures = {"round": f"{median(rounds):.4f}", "least": f"{min(rounds):.4f}", "most": f"{max(rounds):.4f}"}
    for stage in (*STAGES, "context"):
        known = [[r.stage_seconds[stage] for r in records if stage in r.stage_seconds] for records in passes]
        figures[stage] = f"{1e3 * median(map(mean, known)):.4f}" if all(known) else ""
    record = passes[0][0]
    figures["catchup_rows"] = str(record.rows.catchup_computed)
    return figures | {"gathers_us": ""}


def show(rows: Sequence[Row]) -> None:
    """Print rounds with their break-even, and with what pruning saves."""
    plain = {(row["tokens"], row["batch"]): float(row["round"]) for row in rows if row["K"] == "0"}
    bare = {tuple(row[key] for key in KEYS[:3]): row for row in rows if row["pruned"] == NOT_PRUNED}
    ordered = sorted(rows, key=lambda row: (*(int(row[key]) for key in KEYS[:3]), CATCHUPS.index(row["pruned"])))
    columns = (*KEYS, "ms a round", "range", "break-even", *STAGES, "rows", "context us", "context kB")
    columns = (*columns, "to unpruned", "catch-up saved", "nodes")
    body = []
    for row in ordered:
        alone = plain.get((row["tokens"], row["batch"]))
        other = bare.get(tuple(row[key] for key in KEYS[:3])) if row["pruned"] != NOT_PRUNED else None
        body.append(
            [
                *(row[key] for key in KEYS),
                row["round"],
                f"{row['least']}-{row['most']}",
                f"{float(row['round']) / alone:.3f}" if alone and row["K"] != "0" else "-",
                *(row[stage] or "-" for stage in STAGES),
                row["catchup_rows"],
                f"{1e3 * float(row['context']):.1f}" if row.get("context") else "-",
                f"{float(row['context_bytes']) / 1e3:.0f}" if row.get("context_bytes") else "-",
                f"{100 * (float(row['round']) / float(other['round']) - 1):+.2f} %" if other else "-",
                saved(row, other),
                row["nodes"],
            ]
        )
    print(format_table(columns, body, left=("pruned",)))
    profiled = [row for row in ordered if row["gathers_us"]]
    if profiled:
        print("\nKernels that gather rows, us a round, verify's and the commit's included")
        body = [[*(row[key] for key in KEYS), row["gathers_us"]] for row in profiled]
        print(format_table((*KEYS, "us"), body, left=("pruned",)))


def saved(row: Row, unpruned: Row | None) -> str:
    """Say by how much the catch-up step is shorter, if both were timed."""
    if unpruned is None or not (unpruned["catchup"] and row["catchup"]):
        return "-"
    return f"{1e3 * (float(unpruned['catchup']) - float(row['catchup'])):.1f} us"


if __name__ == "__main__":
    sys.exit(guarded(main))
