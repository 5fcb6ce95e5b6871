"""Loads everything that a run needs: prompts, target, drafter, and engines for the run and references that differ."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass, replace

import torch

from spec_lab.build.auto import with_auto_chosen
from spec_lab.build.engine import build_engine, build_teacher
from spec_lab.build.limits import Limits, engine_limits, longest_sequence
from spec_lab.build.models import Last, Models, load_models
from spec_lab.build.workloads import check_requests, open_workload
from spec_lab.config.choices import KernelsChoice
from spec_lab.config.groups import TreeConfig
from spec_lab.config.option import get
from spec_lab.config.run import PruneConfig, RecurrentConfig, Run
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.measure.world import ALONE, World
from spec_lab.record.names import THIS_RUN
from spec_lab.record.progress import progress_of
from spec_lab.workloads.conversations import longest_conversation, output_text, with_later_turns
from spec_lab.workloads.thinking import thinking_markers
from spec_lab.workloads.tokenizer import Tokenizer

MAIN = THIS_RUN


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """Everything loaded for a run.

    Attributes:
        config: the run, with an option in place of each auto.
        engines: the run's own engine under `MAIN`, and those of its references by name.
    """

    config: Run
    world: World
    models: Models
    tokenizer: Tokenizer
    requests: list[Request]
    engines: dict[str, Engine]
    teacher: TeacherForcing


def load_lab(typed: Run, world: World = ALONE, last: Last | None = None) -> LoadedRun:
    """Load prompts, target and drafter, and make the engines. `last` has the models of the run before."""
    config = with_auto_chosen(typed)
    gc.collect()  # frees what an earlier job may have left: engines and their graphs refer to each other
    torch.manual_seed(config.seed)
    use_threads(config)
    tokenizer, first_turns = open_workload(config)
    limits = engine_limits(config, first_turns)
    longest = min(longest_conversation(first_turns, tokenizer), longest_sequence(config))
    max_seq_len, markers = max(limits.max_seq_len, longest), thinking_markers(tokenizer, config.target)
    models = load_models(config, max_seq_len, markers, world.partition, last)
    requests = _with_later_turns(config, models, tokenizer, first_turns)
    limits = engine_limits(config, requests)
    engines = {MAIN: build_engine(config, models, limits)}
    if "plain" in config.references and config.drafter.num_draft_tokens > 0:
        engines["plain"] = plain_engine(config, models, limits)
    for count in config.fixed_k:  # so many drafts in every round
        drafter = replace(config.drafter, plan="none", num_draft_tokens=count)
        fixed = replace(config, drafter=drafter, record=replace(config.record, confidences=False))
        engines[f"k{count}"] = build_engine(fixed, models, engine_limits(fixed, requests))
    if "unpruned" in config.references and _prunes(config.prune, engines[MAIN]):
        engines["unpruned"] = build_engine(replace(config, prune=PruneConfig()), models, limits)
    if "eager" in config.references and config.graph.captures:
        engines["eager"] = build_engine(replace(config, graph=get("graph", "eager")()), models, limits)
    note_kernels(typed, config, models)
    for warning in models.warnings:
        print(warning, file=sys.stderr)
    for request in requests:
        engines[MAIN].scheduler.check(request)
    teacher = build_teacher(config, models, limits)
    teacher.require_finite(requests[0].prompt_ids)  # activations that overflow mostly do so from the first tokens
    return LoadedRun(config, world, models, tokenizer, requests=requests, engines=engines, teacher=teacher)


def use_threads(config: Run) -> None:
    """Set the number of CPU threads, in torch and in C."""
    num_threads = config.num_threads or default_num_threads(config)
    torch.set_num_threads(num_threads)
    if config.kernels == KernelsChoice.native:
        from spec_kernels.native import compiled

        if (given := compiled.use_threads(num_threads)) < num_threads:
            raise UserError(f"num_threads={num_threads}: kernels=native has {given}; use num_threads={given}")


def default_num_threads(config: Run) -> int:
    """Return the number of threads to use if `num_threads` is null. It is 1 for kernels in C, whose threads wait for
    each other in every product, so that one busy core would delay all. Otherwise the target's option may set it.
    Without that, all cores are divided among the processes of the run."""
    if config.kernels == KernelsChoice.native:
        return 1
    shared = max(1, (os.cpu_count() or 1) // config.target.tensor_parallel)
    return config.target.num_threads or shared


def _with_later_turns(config: Run, models: Models, tokenizer: Tokenizer, first_turns: list[Request]) -> list[Request]:
    """Return the requests of all turns. Plain decoding answers each turn that another one follows."""

    def answer(asked: list[Request]) -> list[str]:
        engine = plain_engine(config, models, engine_limits(config, asked))
        with progress_of(len(asked)) as progress:
            progress.set_description("answering the turns before the last")
            records = engine.generate(asked, on_finish=lambda _: progress.update()).requests
        eos = models.target.eos_token_ids
        answered = zip(asked, records, strict=True)
        return [output_text(tokenizer, request, record.output_ids, eos) for request, record in answered]

    unusable = config.workload.unusable
    requests = with_later_turns(first_turns, tokenizer, answer, longest_sequence(config), unusable)
    check_requests(config, requests, models.target.config)
    return requests


def plain_config(run: Run) -> Run:
    """Return the same run, but with plain decoding and a lossless rule, for references=[plain] and other plain passes.

    After the last KV write, its prompt pass computes only the last row, and logits for it alone, as in serving engines.
    """
    return replace(
        run,
        drafter=get("drafter", "none")(),
        acceptance=get("acceptance", "rejection" if run.sampling.temperature > 0 else "strict")(),
        prune=get("prune", "prefill")(),
        tree=TreeConfig(),
        recurrent=RecurrentConfig(),
    )


def plain_engine(config: Run, models: Models, limits: Limits) -> Engine:
    """Make the engine of plain decoding, with the config of `plain_config`."""
    return build_engine(plain_config(config), models, limits)


def note_kernels(typed: Run, config: Run, models: Models) -> None:
    """Log which kernels `auto` chose on a CPU, and how many layers `kernels=native` does not replace."""
    if typed.kernels == KernelsChoice.auto and models.device.type == "cpu" and config.target.num_threads is None:
        print(f"kernels={config.kernels}", file=sys.stderr)
    if config.kernels != KernelsChoice.native:
        return
    layers = models.target.layers
    num_taken = sum(getattr(layer, "row_invariant", False) for layer in layers)
    if num_taken < len(layers):
        print(
            f"kernels=native computes {num_taken} of the target's {len(layers)} layers; torch computes the others, "
            "which are not plain attention and MLPs, or whose widths do not fill C's vectors",
            file=sys.stderr,
        )


def _prunes(prune: PruneConfig, engine: Engine) -> bool:
    """Return whether anything is pruned. A drafter without a catch-up step makes `prune.catchup` a no-op, which is
    logged. So does a block drafter in a graph."""
    unpruned = PruneConfig()
    asks_catchup = prune.catchup != unpruned.catchup
    catches_up = engine.parts.drafter.requirements.catches_up
    if asks_catchup and not catches_up:
        why = "has no catch-up step, or its rows are counted on the host and the step is in a graph"
        print(f"prune.catchup={prune.catchup} has nothing to prune: this drafter {why}", file=sys.stderr)
    return prune.prefill != unpruned.prefill or (asks_catchup and catches_up)
