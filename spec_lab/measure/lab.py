"""Loads everything that a run needs: prompts, target, drafter, and engines for the run and references that differ."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.measure.world import ALONE, World
from spec_lab.menu.auto import why_kernels
from spec_lab.menu.choices import ByRequest, KernelsChoice, Rollback
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import PruneConfig, RunConfig
from spec_lab.options.plain import UNPRUNED, eager_config, plain_config, unpruned_config
from spec_lab.record.names import THIS_RUN
from spec_lab.record.progress import Progress
from spec_lab.wiring.drafting import load_drafter
from spec_lab.wiring.engine import build_engine, build_teacher
from spec_lab.wiring.kernels import require_native
from spec_lab.wiring.limits import Limits, engine_limits
from spec_lab.wiring.models import TargetBuild, load_models, thinking_markers
from spec_lab.wiring.workloads import check_requests, longest_sequence, open_workload
from spec_lab.workloads.conversations import before_end, longest_conversation, with_later_turns
from spec_lab.workloads.tokenizer import Tokenizer

MAIN = THIS_RUN


@dataclass(frozen=True, slots=True)
class Lab:
    """Everything loaded for a run.

    Attributes:
        engines: the run's own engine under `MAIN`, and those of its references by name.
    """

    chosen: Chosen
    world: World
    models: TargetBuild
    tokenizer: Tokenizer
    requests: list[Request]
    engines: dict[str, Engine]
    teacher: TeacherForcing

    @property
    def config(self) -> RunConfig:
        return self.chosen.config


def load_lab(chosen: Chosen, world: World = ALONE) -> Lab:
    """Load prompts, target and drafter, and make the engines."""
    config = chosen.config
    gc.collect()  # frees what an earlier job may have left: engines and their graphs refer to each other
    torch.manual_seed(config.seed)
    use_threads(chosen)
    tokenizer, first_turns = open_workload(chosen)
    limits = engine_limits(chosen, first_turns, config.drafter.num_draft_tokens)
    longest = min(longest_conversation(first_turns, tokenizer), longest_sequence(chosen))
    models = load_models(chosen, max(limits.max_seq_len, longest), thinking_markers(tokenizer), world.partition)
    requests = _with_later_turns(chosen, models, tokenizer, first_turns)
    limits = engine_limits(chosen, requests, config.drafter.num_draft_tokens)
    make_drafter = load_drafter(chosen, models.of_drafters)
    engines = {MAIN: build_engine(chosen, models, make_drafter, limits)}
    if "plain" in config.references and config.drafter.num_draft_tokens > 0:
        engines["plain"] = plain_engine(chosen, models, limits)
    if "unpruned" in config.references and _prunes(config.prune, engines[MAIN]):
        engines["unpruned"] = build_engine(chosen.again(unpruned_config(config)), models, make_drafter, limits)
    if "eager" in config.references and chosen.graph.captures:
        engines["eager"] = build_engine(chosen.again(eager_config(config)), models, make_drafter, limits)
    note_references(config, engines)
    note_rollback(config, models)
    note_given(config, requests)
    note_kernels(chosen, models)
    for request in requests:
        engines[MAIN].scheduler.check(request)
    teacher = build_teacher(config, models, limits)
    teacher.require_finite(requests[0].prompt_ids)  # activations that overflow mostly do so from the first tokens
    return Lab(chosen, world, models, tokenizer, requests, engines, teacher)


def use_threads(chosen: Chosen) -> None:
    """Set the number of CPU threads, in torch and in C."""
    num_threads = chosen.config.num_threads or default_num_threads(chosen)
    torch.set_num_threads(num_threads)
    if chosen.config.kernels == KernelsChoice.native:
        require_native()
        from spec_kernels.native import compiled

        if (given := compiled.use_threads(num_threads)) < num_threads:
            raise UserError(f"num_threads={num_threads}: kernels=native has {given}; use num_threads={given}")


def default_num_threads(chosen: Chosen) -> int:
    """Return the number of threads to use if `num_threads` is null. It is 1 for kernels in C, whose threads wait for
    each other in every product, so that one busy core would delay all. Otherwise the target's option may set it.
    Without that, all cores are divided among the processes of the run."""
    if chosen.config.kernels == KernelsChoice.native:
        return 1
    shared = max(1, (os.cpu_count() or 1) // chosen.config.target.tensor_parallel)
    return chosen.target.num_threads or shared


def _with_later_turns(
    chosen: Chosen, models: TargetBuild, tokenizer: Tokenizer, first_turns: list[Request]
) -> list[Request]:
    """Return the requests of all turns. Plain decoding answers each turn that another one follows."""

    def answer(asked: list[Request]) -> list[str]:
        engine = plain_engine(chosen, models, engine_limits(chosen, asked, 0))
        with Progress(len(asked), "answer") as progress:
            progress.stage("answering the turns before the last")
            records = engine.generate(asked, on_finish=lambda _: progress.advance()).requests
        return [tokenizer.decode(before_end(record.output_ids, models.target.eos_token_ids)) for record in records]

    unusable = chosen.config.workload.unusable
    requests = with_later_turns(first_turns, tokenizer, answer, longest_sequence(chosen), unusable)
    check_requests(requests, models.target.config, chosen.target_folder)
    return requests


def plain_engine(chosen: Chosen, models: TargetBuild, limits: Limits) -> Engine:
    """Make the engine of plain decoding, with the config of `plain_config`."""
    plain = chosen.again(plain_config(chosen.config))
    return build_engine(plain, models, load_drafter(plain, models.of_drafters), limits)


def note_references(config: RunConfig, engines: Mapping[str, Engine]) -> None:
    """Log which references equal the run itself, and so are not measured; nothing for the default references."""
    idle = [str(name) for name in config.references if name not in engines]
    if idle and config.references != RunConfig().references:
        print(f"references: the run itself is {' and '.join(idle)}, so no such reference is measured", file=sys.stderr)


def note_rollback(config: RunConfig, models: TargetBuild) -> None:
    """Log if `recurrent.rollback` is set but a no-op for this target. It is not an error, so that sweeps compose."""
    rollback = config.recurrent.rollback
    if rollback != Rollback.checkpoints and not models.target.config.keeps_states:
        print(f"recurrent.rollback={rollback} changes nothing: no layer of this target keeps a state", file=sys.stderr)


def note_given(config: RunConfig, requests: Sequence[Request]) -> None:
    """Log if `drafter.by_request=given` is a no-op."""
    is_given = any(request.num_draft_tokens is not None for request in requests)
    if config.drafter.by_request == ByRequest.given and not is_given:
        print("drafter.by_request=given changes nothing: no prompt has `num_draft_tokens`", file=sys.stderr)


def note_kernels(chosen: Chosen, models: TargetBuild) -> None:
    """Log which kernels `auto` chose on a CPU and why, that `row_invariant=false` is a no-op, and how many layers
    `kernels=native` does not replace."""
    config = chosen.config
    if "kernels" in config.auto and models.device.type == "cpu" and chosen.target.num_threads is None:
        print(why_kernels(chosen), file=sys.stderr)
    name, dtype = config.kernels, str(models.dtype).removeprefix("torch.")
    if not config.row_invariant and (name != KernelsChoice.triton or models.dtype is torch.float32):
        print(
            f"row_invariant=false changes nothing with kernels={name} and dtype={dtype}: it chooses among "
            "products of kernels=triton in 16 bits",
            file=sys.stderr,
        )
    if name != KernelsChoice.native:
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
    logged."""
    asks_catchup = prune.catchup != UNPRUNED.catchup
    catches_up = engine.parts.drafter.requirements.catches_up
    if asks_catchup and not catches_up:
        print(f"prune.catchup={prune.catchup} has nothing to prune: this drafter has no catch-up step", file=sys.stderr)
    return prune.prefill != UNPRUNED.prefill or (asks_catchup and catches_up)
