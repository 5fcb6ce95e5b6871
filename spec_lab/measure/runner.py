"""Runs and records a loaded run: warm-up, timed passes in turns with the references, audit, profile."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

from spec_kernels.native.build import register_file
from spec_lab.acceptance.phase import thinking_mask
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import Last
from spec_lab.checkpoints.digest import target_digest
from spec_lab.checkpoints.quantised import OF_GPT_OSS, stored_types
from spec_lab.config.choices import KernelsChoice, WeightDtype, Weights
from spec_lab.config.extensions import load_options
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.results import GenerationResult, RequestRecord
from spec_lab.core.types import Request
from spec_lab.measure.answers import check_answers, note_unread
from spec_lab.measure.audit import audit
from spec_lab.measure.company import Company
from spec_lab.measure.lab import MAIN, LoadedRun, load_lab, plain_engine
from spec_lab.measure.memory import MemoryWatch
from spec_lab.measure.profiling import profile_rounds
from spec_lab.measure.trajectory import fitting, record_verify_rows
from spec_lab.measure.world import World, world_of
from spec_lab.record import models
from spec_lab.record.metric import Measured
from spec_lab.record.models import Divergence, Target
from spec_lab.record.models import Request as RequestRow
from spec_lab.record.progress import counted, progress_of
from spec_lab.record.provenance import machine_of, origins
from spec_lab.record.recorder import Recorder, begun, request_row
from spec_lab.record.summary import finished_run
from spec_lab.record.verify_rows import save_verify_rows
from spec_lab.workloads.arrivals import arriving
from spec_lab.workloads.chat_template import NO_TEMPLATE, template_digest
from spec_lab.workloads.checker import Checked
from spec_lab.workloads.text_ends import text_ends

Pass = TypeVar("Pass")
WARMUP_TOKENS = 32
SHARED = "its times mean nothing, since another process was on its device"


def record_run(config: Run, choices: dict[str, str], folder: Path, last: Last | None = None) -> models.Run:
    """Run and record into `folder`. `last` has the models of the run before, which are used again if they are the same.

    Raises:
        UserError: a checkpoint, a prompt set or a size is wrong, which is found before anything is recorded; or the
            logits are not finite, or a checker or another part of an extension fails.
    """
    memory = MemoryWatch.begin()
    with world_of(config) as world:
        return _record_in(world, config, choices, folder, memory, last)


def _record_in(
    world: World,
    config: Run,
    choices: dict[str, str],
    folder: Path,
    memory: MemoryWatch,
    last: Last | None,
) -> models.Run:
    """Run and record. What is loaded here can be freed when this returns, before the process group is closed."""
    print("loading prompts and weights ...", file=sys.stderr, flush=True)
    lab = load_lab(config, world, last)
    taken = {group: getattr(lab.config, group).name for group, name in choices.items() if name == "auto"}
    known = identity(lab.config, lab.models.device, lab.models.dtype, torch.get_num_threads())
    known["notes"] = list(dict.fromkeys(lab.models.warnings))
    info = begun(dataclasses.asdict(lab.config), choices | taken, **known)
    with Recorder.open(folder, info, config.logger.sinks()) as recorder:
        recorded = _measure(lab, info, recorder, memory)
        recorder.finish(recorded)
    return recorded


def _measure(lab: LoadedRun, info: models.Run, recorder: Recorder, memory: MemoryWatch) -> models.Run:
    """Warm up, time the repeats, audit and profile, and return the finished record."""
    config, offered = lab.config, offered_requests(lab.config, lab.requests, lab.world.size)
    company = Company(lab.models.device) if lab.world.size == 1 else None  # ranks share a CPU
    with progress_of(config.repeats * len(lab.engines) * len(offered)) as progress:
        _warm_up(lab, progress)
        gc.freeze()  # so that collecting before each pass looks only at what passes leave
        turns = in_turns(
            config, list(lab.engines), progress, recorder, lambda name, end: _timed_pass(lab, name, offered, end)
        )
        for repeat, passes in enumerate(turns):
            recorder.rounds(repeat, passes[MAIN][-1].rounds)
            if repeat > 0:
                continue
            records = passes[MAIN][0].requests
            for record in counted(progress, "checking the outputs", records if config.record.audit else []):
                lab.teacher.require_finite([*record.prompt_ids, *record.output_ids[:-1]])
            divergences = _audit(lab, passes, progress)
            rows = {name: request_rows(lab, name, of[0].requests, divergences or {}) for name, of in passes.items()}
            recorder.requests(rows[MAIN])
        gc.unfreeze()
        progress.set_description("profiling")
        batch = lab.requests[: config.batch_size]
        profile = profile_rounds(lab.engines[MAIN], batch, config.profile_rounds, recorder.folder)
        _keep_verify_rows(lab, records, recorder.folder, progress)
    measured = {name: Measured(rows[name], of, of[0].num_draft_tokens) for name, of in passes.items()}
    main = dataclasses.replace(
        measured.pop(MAIN),
        references=measured,
        is_compared=divergences is not None,
        work={**profile.work, **memory.read(lab.models.device)},
        tells_offers=config.drafter.tells_offers,
    )
    traits = lab.engines[MAIN].parts.rule.traits
    return finished_run(
        info,
        main,
        seconds=recorder.seconds,
        kernels=profile.kernels,
        costs=_costs(lab),
        acceptance_imposed=traits.imposed,
        acceptance_lossless=traits.lossless,
        row_invariant=lab.models.invariant_rows > 1,
        notes=[*info.notes, *([SHARED] if company is not None and company.seen() else [])],
    )


def in_turns(
    config: Run,
    names: Sequence[str],
    progress: tqdm,
    recorder: Recorder,
    timed: Callable[[str, Callable[[RequestRecord], None]], Pass],
) -> Iterator[dict[str, list[Pass]]]:
    """Time each configuration once a repeat, in rotating order, so that a slowing machine does not always affect the
    same one. After each repeat yield the passes of each so far, so that a long run checks and keeps its first ones.

    Args:
        timed: times a pass of a configuration, and calls its second argument with each request that ends.
    """
    passes: dict[str, list[Pass]] = {name: [] for name in names}
    for repeat in range(config.repeats):
        shift = repeat % len(names)
        for name in (*names[shift:], *names[:shift]):

            def end(record: RequestRecord, is_first: bool = (repeat, name) == (0, MAIN)) -> None:
                if is_first:
                    recorder.decoded(record)
                progress.update()

            progress.set_description(f"{name}, repeat {repeat + 1} of {config.repeats}")
            passes[name].append(timed(name, end))
        yield passes


def _costs(lab: LoadedRun) -> list[models.RoundCost]:
    """Return what the run's plan measured."""
    plan = lab.engines[MAIN].rounds.plan
    timed = {} if plan is None or plan.costs is None else plan.costs.timed
    return [
        models.RoundCost(num_requests=size, num_offered=shape.num_offered, num_made=shape.num_made, seconds=seconds)
        for (size, shape), seconds in timed.items()
    ]


def offered_requests(config: Run, requests: list[Request], num_processes: int = 1) -> list[Request]:
    """Return the requests of a timed pass, with their arrival times if there is a rate: the same in every pass."""
    load = config.workload
    if load.request_rate is None:
        if load.duration is not None:
            raise UserError("workload.duration ends arrivals, so it needs workload.request_rate")
        return requests
    if num_processes > 1:
        raise UserError("workload.request_rate needs one process, since arrivals differ between processes")
    offered = arriving(requests, load.request_rate, load.burstiness, load.duration, config.seed)
    if not offered:
        raise UserError(f"workload.duration={load.duration} ends before the first request arrives; raise it")
    return offered


def _warm_up(lab: LoadedRun, progress: tqdm) -> None:
    """Prepare the engines. Unless `warmup_requests` is 0, also run each once untimed, so that no first call is timed.
    Run plain decoding first if a drafter replays it."""
    _teach(lab, progress)
    progress.set_description("warm-up")
    for engine in lab.engines.values():
        engine.prepare()
    if short := warmup_requests(lab.config, lab.requests):
        for engine in lab.engines.values():
            engine.generate(short)


def warmup_requests(config: Run, requests: list[Request]) -> list[Request]:
    """Return short requests to warm up with: at least a full batch, so that the shapes of full rounds are run too."""
    first = requests[: max(config.warmup_requests, config.batch_size)] if config.warmup_requests else []
    return [dataclasses.replace(each, max_new_tokens=min(WARMUP_TOKENS, each.max_new_tokens)) for each in first]


def _teach(lab: LoadedRun, progress: tqdm) -> None:
    """Give plain decoding's continuations to every drafter that replays them; each engine has its own drafter."""
    drafters: list[Any] = [engine.parts.drafter for engine in lab.engines.values()]
    learners = [drafter for drafter in drafters if drafter.requirements.learns_continuations]
    if learners:
        progress.set_description("recording plain continuations")
        outputs = _plain_outputs(lab)
        for drafter in learners:
            drafter.learn(outputs)


def _plain_outputs(lab: LoadedRun) -> dict[str, list[int]]:
    """Return outputs of plain decoding, K tokens longer, since the last round drafts and judges past the limit."""
    num_more = lab.config.drafter.num_draft_tokens
    limits = engine_limits(lab.config, lab.requests)
    longer = dataclasses.replace(
        limits,
        max_seq_len=limits.max_seq_len + num_more,
        margin=limits.margin - num_more,
        max_kv_len=limits.max_kv_len + num_more,
    )
    requests = [dataclasses.replace(r, max_new_tokens=r.max_new_tokens + num_more) for r in lab.requests]
    return _outputs(plain_engine(lab.config, lab.models, longer).generate(requests).requests)


def _timed_pass(
    lab: LoadedRun, name: str, offered: list[Request], end: Callable[[RequestRecord], None]
) -> GenerationResult:
    """Decode the offered requests with one engine, and call `end` with each when it ends."""
    gc.collect()
    engine = lab.engines[name]
    before = dataclasses.replace(engine.graph.counts)
    result = engine.generate(offered, on_finish=end)
    graph, num_replays = result.graph, result.graph.replays - before.replays
    # A plan captures a shape when it first chooses it.
    if graph.captures > before.captures and engine.rounds.plan is None:
        raise RuntimeError(f"graph={graph.mode} captured a graph in a timed pass, which warm-up should have done")
    # With graph.verify=false a reference may have nothing to capture.
    must_replay = name == MAIN and lab.config.graph.captures
    if must_replay and num_replays * graph.rounds_per_replay < len(result.rounds):
        raise RuntimeError(
            f"graph={graph.mode} replayed {num_replays} times in {len(result.rounds)} rounds; use graph=eager"
        )
    lab.world.require_agreement(result, lab.models.device)
    return result


def _audit(
    lab: LoadedRun, passes: Mapping[str, list[GenerationResult]], progress: tqdm
) -> dict[str, Divergence] | None:
    """Compare the outputs with plain decoding's; None with sampling, where they need not be equal, and without
    record.audit."""
    if lab.config.sampling.temperature > 0 or not lab.config.record.audit:
        return None
    plain = _outputs(passes["plain"][0].requests) if "plain" in passes else None
    lossless = lab.engines[MAIN].parts.rule.traits.lossless
    records = counted(progress, "comparing the outputs with plain decoding", passes[MAIN][0].requests)
    return audit(records, plain, lab.teacher, lab.teacher.rounds_to, lossless)


def _outputs(records: Iterable[RequestRecord]) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in records}


def request_rows(
    lab: LoadedRun,
    name: str,
    records: Sequence[RequestRecord],
    divergences: Mapping[str, Divergence],
) -> list[RequestRow]:
    """Make the records of some requests of one configuration: text, answer, thinking, and the run's own divergences."""
    checked: Mapping[str, Checked | None] = check_answers(lab, name, records)
    if name == MAIN:
        note_unread(records, checked)
    rows = []
    for record in records:
        text, answer = lab.tokenizer.decode(record.output_ids), checked[record.request_id]
        rows.append(
            request_row(
                record,
                text=text,
                text_ends=text_ends(lab.tokenizer, record.output_ids, text) if name == MAIN else None,
                correct=None if answer is None else answer.correct,
                checker=None if answer is None else answer.checker,
                answer_read=None if answer is None else answer.read,
                divergence=divergences.get(record.request_id) if name == MAIN else None,
                thinking_spans=_thinking_spans(lab, record),
            )
        )
    return rows


def _thinking_spans(lab: LoadedRun, record: RequestRecord) -> list[tuple[int, int]] | None:
    """Return the stretches of the output inside thinking; None if the tokenizer has no thinking markers."""
    if lab.models.markers is None:
        return None
    mask = thinking_mask(record.prompt_ids, record.output_ids, lab.models.markers)
    edges = [place for place, (one, other) in enumerate(pairwise([False, *mask, False])) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _keep_verify_rows(lab: LoadedRun, records: list[RequestRecord], folder: Path, progress: tqdm) -> None:
    config, engine = lab.config, lab.engines[MAIN]
    topk = config.record.topk
    if topk == 0:
        return
    progress.set_description("recording verify rows")
    requests = fitting(lab.requests, records, engine.num_draft_tokens, topk)
    rows = record_verify_rows(engine, requests, topk, lab.models.markers, config.cache.chunk_size)
    save_verify_rows(folder, rows)


def identity(
    config: Run, device: torch.device, dtype: torch.dtype, num_threads: int, has_weights: bool = True
) -> dict[str, Any]:
    """Return what decodes, on which machine: fields of the record. Without `has_weights` the target's are elsewhere."""
    is_random, path = config.target.weights == Weights.random, config.target.folder
    word, stored = str(dtype).removeprefix("torch."), stored_types(path) if has_weights and not is_random else None
    return {
        "target": Target(
            name=config.target.name,
            digest=target_digest(path, config.seed if is_random else None) if has_weights else None,
            template=NO_TEMPLATE if is_random else template_digest(path),
            dtype=word,
            weights=weights_in_words(config.target.weight_dtype, word, stored) if has_weights else None,
        ),
        "machine": machine_of(
            str(device),
            num_threads=num_threads,
            world_size=config.target.tensor_parallel,
            extensions=origins(load_options(config.extensions)),
            register_file=register_file() if config.kernels == KernelsChoice.native else None,
        ),
        "sampling": {key: value for key, value in dataclasses.asdict(config.sampling).items() if key != "name"},
        "thinking": config.workload.thinking,
    }


def weights_in_words(kept_in: WeightDtype, dtype: str, stored: Sequence[str] | None) -> str:
    """Return what the weights of the target's products are kept in, and from what they were made.

    Args:
        stored: the narrow types or forms in the target's files; None for plain floating point.
    """
    wide = dtype if stored is None else f"{dtype}, widened from {', '.join(stored)}"
    if kept_in == WeightDtype.auto:
        return wide
    if kept_in == WeightDtype.fp8 and stored is not None and stored[0].startswith("fp8 in blocks"):
        return f"fp8, as stored: {stored[0]}"
    if kept_in == WeightDtype.mxfp4 and stored == [OF_GPT_OSS]:
        return "mxfp4, as stored"
    return f"{kept_in}, rounded when read from {wide}"
