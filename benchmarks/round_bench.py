"""The common parts of `moe_round.py` and `family_round.py`, which time rounds of targets with random weights on one
GPU.

The cells of a target share its weights and those of its drafter, in one process. The number of accepted drafts is
imposed, the same in every round, so that every round of a cell has all of its requests.
"""

from __future__ import annotations

import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import floor
import torch
from measured_rows import append_row, read_rows

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import eagle3_tensor_shapes
from spec_lab.checkpoints.eagle3_config import Eagle3Config
from spec_lab.core.errors import UserError
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.menu.chosen import Chosen, choose
from spec_lab.menu.config import RunConfig
from spec_lab.options.drafters.eagle3 import eagle3_factory, read_eagle3
from spec_lab.options.drafters.frozen_kv import frozen_kv_factory, read_assistant
from spec_lab.options.drafters.mtp import read_mtp_modules
from spec_lab.options.drafters.mtp_eagle import mtp_eagle_factory
from spec_lab.program.compose import compose_run
from spec_lab.wiring.drafting import DrafterFactory, load_drafter
from spec_lab.wiring.engine import build_engine
from spec_lab.wiring.limits import engine_limits
from spec_lab.wiring.models import DrafterBuild, load_models
from spec_lab.wiring.workloads import open_workload

NUM_ROUNDS, LEFT_OUT = 24, 4
STAGES = ("verify", "catchup", "recur")
EMBEDDING_SCALE = 50.0
"""Embeddings are multiplied by this, so that they outweigh what attention adds. Otherwise random layers make all rows
of a text alike, and these choose the same experts."""
HEAD_SCALE = 100.0
"""The second MLP matrix of a random EAGLE-3 head is multiplied by this, so that the MLP's output outweighs its input.
`norm_output` norms the state that a step passes on, so that this also holds in the next step. Otherwise the head drafts
one token again and again, and the rows of these drafts choose the same experts."""
COMMON = (
    *("target.weights=random", "workload=random_ids", "attention=triton", "kernels=triton", "graph=round"),
    *("device=cuda", "references=[]", "warmup_requests=0"),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A target and its drafter, of random weights.

    Attributes:
        overrides: overrides for the target, and for anything else that all of its cells share.
        drafter: the overrides of its drafter.
        catches_up: whether the drafter has a catch-up step to prune.
    """

    name: str
    overrides: tuple[str, ...]
    drafter: tuple[str, ...] = ("drafter=mtp_eagle", "drafter.weights=random")
    prompt_tokens: int = 512
    catches_up: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table; `num_draft_tokens` of 0 is plain decoding, `changes` are further overrides."""

    model: Model
    batch_size: int
    num_draft_tokens: int
    catchup: str = "pre_attention"
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        catchup = self.catchup if self.model.catches_up else "no catch-up"
        drafts = f"K={self.num_draft_tokens}, {catchup}" if self.num_draft_tokens else "no drafter"
        return ", ".join((self.model.name, f"batch {self.batch_size}", drafts, *self.changes))

    @property
    def num_emitted(self) -> int:
        """Tokens that every round of a request emits."""
        return self.num_draft_tokens // 2 + 2 if self.num_draft_tokens else 1

    def overrides(self) -> list[str]:
        """Return the overrides of the cell's run."""
        drafter: tuple[str, ...] = ("drafter=none",)
        if self.num_draft_tokens:
            drafter = (
                *self.model.drafter,
                f"drafter.num_draft_tokens={self.num_draft_tokens}",
                *(("prune=catchup", f"prune.catchup={self.catchup}") if self.model.catches_up else ()),
                "acceptance=synthetic",
                f"acceptance.mean_length={self.num_emitted}",
            )
        return [
            *COMMON,
            *self.model.overrides,
            *drafter,
            f"batch_size={self.batch_size}",
            f"workload.num_requests={self.batch_size}",
            f"workload.prompt_tokens={self.model.prompt_tokens}",
            f"max_new_tokens={1 + self.num_emitted * NUM_ROUNDS}",
            *self.changes,
        ]


def leaves_rounds_behind(config: RunConfig) -> str | None:
    """Say why a cell cannot be timed, if not all of its rounds would have all requests."""
    graph: Any = config.graph
    if getattr(graph, "overlap", False) and graph.rounds_per_replay == 1:
        return (
            "graph.overlap=true launches a round after all requests have ended, but timed rounds have all; leave it "
            "out, or add graph.rounds_per_replay=2"
        )
    return None


def missing_cells(cells: Sequence[Cell], table: Path) -> list[Cell]:
    """Return the cells that have no line yet."""
    there = {row["cell"] for row in read_rows(table)}
    return [cell for cell in cells if cell.name not in there]


def run_cells(
    cells: Sequence[Cell], table: Path, deadline: float, make_bench: Callable[[Sequence[Cell]], Bench]
) -> bool:
    """Run the cells of each model one after another with one set of weights, until `deadline`. Return whether any
    failed."""
    failed = False
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        if perf_counter() > deadline:
            break
        start = perf_counter()
        try:
            bench = make_bench(own)
        except UserError as error:
            print(f"{model.name}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        print(f"-- {model.name}: weights in {perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        for cell in own:
            if perf_counter() > deadline:
                break
            try:
                start = perf_counter()
                append_row(table, bench.measured(cell))
                print(f"-- {cell.name}: {perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
            except (UserError, RuntimeError) as error:
                print(f"{cell.name}: {error}", file=sys.stderr, flush=True)
                failed = True
        del bench
        torch.cuda.empty_cache()
    return failed


@dataclass(frozen=True, slots=True)
class Figures:
    """The times of a cell, in milliseconds and as medians over its rounds, and the experts that a round reads.

    Attributes:
        stages: the times of `STAGES`, by name.
        experts: different ones, added up over layers and averaged over rounds, by the stage that reads them.
    """

    round_ms: float
    floor_ms: float
    stages: dict[str, float]
    experts: dict[str, float]
    prompt_ms: float


class Bench(ABC):
    """Times the cells of one model with one set of weights. Subclasses say which figures a line of the table has."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        """Make weights for the longest of `cells`."""
        largest = max(cells, key=lambda cell: cell.num_draft_tokens)
        largest = replace(largest, batch_size=max(cell.batch_size for cell in cells))
        config, _ = compose_run(largest.overrides())
        torch.manual_seed(config.seed)
        longest = largest.model.prompt_tokens + 1 + largest.num_emitted * NUM_ROUNDS
        self.models = load_models(choose(config), longest)
        self.models.target.embedding.mul_(EMBEDDING_SCALE)
        has_drafter = largest.num_draft_tokens and largest.model.catches_up
        self.drafter = read_drafter(choose(config), self.models.of_drafters) if has_drafter else None

    def measured(self, cell: Cell) -> dict[str, str]:
        """Run a cell, and return its line."""
        gc.collect()
        torch.cuda.empty_cache()
        config, _ = compose_run(cell.overrides())
        refusal = leaves_rounds_behind(config)
        if refusal is not None:
            raise UserError(refusal)
        if self.models.backend.latent is not None:
            self.models.backend.latent.expect(cell.batch_size)
        chosen = choose(config)
        _, requests = open_workload(chosen)
        limits = engine_limits(chosen, requests, cell.num_draft_tokens)
        drafter = self.drafter if cell.num_draft_tokens else None
        make = load_drafter(chosen, self.models.of_drafters) if drafter is None else drafter.make(chosen)
        engine = build_engine(chosen, self.models, make, limits)
        with torch.inference_mode():
            engine.graph.prepare(engine.rounds.of_batch(cell.batch_size), cell.batch_size)
        result = engine.generate(requests)
        return self.line(cell, result, engine, requests)

    @abstractmethod
    def line(self, cell: Cell, result: GenerationResult, engine: Engine, requests: Sequence[Request]) -> dict[str, str]:
        """Return the line of a cell that was run; `engine` can run its `requests` again."""

    def figures(self, cell: Cell, result: GenerationResult) -> Figures:
        """Take the figures of a cell that was run; its first rounds are not timed."""
        rounds = result.rounds[LEFT_OUT:]
        assert all(len(one.request_ids) == cell.batch_size for one in result.rounds), "all requests end together"
        counts = result.experts_read
        experts = {name: getattr(counts, name) / len(result.rounds) if counts else 0.0 for name in STAGES}
        return Figures(
            round_ms=1e3 * median(one.seconds for one in rounds),
            floor_ms=1e3 * sum(work.seconds for work in self.works(cell, experts)),
            stages={name: 1e3 * median(one.stage_seconds.get(name, 0.0) for one in rounds) for name in STAGES},
            experts=experts,
            prompt_ms=1e3 * median(one.seconds for one in result.prefills),
        )

    def works(self, cell: Cell, experts: dict[str, float]) -> list[floor.Work]:
        """Return the work of the passes of a round, in the middle of the output."""
        target, batch, num_rows = self.models.target.config, cell.batch_size, cell.num_draft_tokens + 1
        seq_len = cell.model.prompt_tokens + cell.num_emitted * NUM_ROUNDS / 2
        works = [floor.target_work(target, batch, num_rows, seq_len, experts["verify"])]
        if self.drafter and cell.num_draft_tokens:
            works += self.drafter.works(cell, experts, seq_len)
        return works


@dataclass(frozen=True, slots=True)
class Drafter:
    """The weights of a drafter, read once.

    Attributes:
        make: returns the drafter's factory for a cell's run.
        works: returns the work of the drafter's passes in a round.
    """

    make: Callable[[Chosen], DrafterFactory]
    works: Callable[[Cell, dict[str, float], float], list[floor.Work]]


def read_drafter(chosen: Chosen, build: DrafterBuild) -> Drafter:
    """Make the weights of an EAGLE-3 head, of an assistant, or of an MTP module."""
    options: Any = chosen.config.drafter
    if options.name == "eagle3":
        head, tensors = read_eagle3(chosen, options, build)
        head = replace(head, norm_output=True)
        for name, tensor in tensors.items():
            if name.endswith("down_proj.weight"):
                tensor.mul_(HEAD_SCALE)
        return Drafter(
            lambda cell: eagle3_factory(cell, cell.config.drafter, build, head, tensors),  # type: ignore[arg-type]
            lambda cell, _, seq_len: eagle3_works(head, cell, seq_len),
        )
    if options.name == "frozen_kv":
        assistant, weights = read_assistant(chosen, options, build)
        return Drafter(
            lambda cell: frozen_kv_factory(cell, cell.config.drafter, build, assistant, weights),  # type: ignore[arg-type]
            lambda cell, _, seq_len: (
                [floor.assistant_work(assistant, cell.batch_size, seq_len)] * cell.num_draft_tokens
            ),
        )
    mtp, modules = read_mtp_modules(chosen, options, build, 1)
    return Drafter(
        lambda cell: mtp_eagle_factory(cell, cell.config.drafter, build, mtp, modules),  # type: ignore[arg-type]
        lambda cell, experts, seq_len: module_works(mtp.layer, cell, experts, seq_len),
    )


def eagle3_works(head: Eagle3Config, cell: Cell, seq_len: float) -> list[floor.Work]:
    """Return the work of the passes of an EAGLE-3 head, which is dense."""
    return floor.draft_work(head.layer, eagle3_tensor_shapes(head), cell.num_draft_tokens, cell.batch_size, seq_len)


def module_works(layer: ModelConfig, cell: Cell, experts: dict[str, float], seq_len: float) -> list[floor.Work]:
    """Return the work of the passes of an MTP module: the catch-up, and the other draft steps."""
    num_steps = cell.num_draft_tokens - 1
    first = floor.module_work(layer, cell.batch_size, cell.num_draft_tokens + 1, seq_len, experts["catchup"])
    each = experts["recur"] / max(1, num_steps)
    return [first, *[floor.module_work(layer, cell.batch_size, 1, seq_len, each)] * num_steps]
