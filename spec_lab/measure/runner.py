"""Runs and records a loaded run: warm-up, timed passes in turns with the references, audit, profile."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from spec_lab.acceptance.phase import thinking_mask
from spec_lab.checkpoints.digest import target_digest
from spec_lab.checkpoints.gguf import quantizations
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.core.errors import is_interruption
from spec_lab.core.results import GenerationResult, GraphCounts, RequestRecord
from spec_lab.measure.answers import check_answers, correct_of, note_unread
from spec_lab.measure.audit import audit
from spec_lab.measure.lab import MAIN, Lab, load_lab, plain_engine
from spec_lab.measure.memory import MemoryWatch
from spec_lab.measure.profiling import RoundProfile, profile_rounds
from spec_lab.measure.trajectory import fitting, record_verify_rows
from spec_lab.measure.world import World, world_of
from spec_lab.menu.choices import WeightDtype, Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.option import MetricOption
from spec_lab.record.measured import Divergence, Measured, RunInfo
from spec_lab.record.metrics import OwnMetrics
from spec_lab.record.paired import order_of_turn
from spec_lab.record.progress import Progress, said_to_go_on
from spec_lab.record.provenance import Provenance, collect_provenance
from spec_lab.record.recorder import Recorder, request_row, utc_now
from spec_lab.record.schema import Summary
from spec_lab.record.sinks import Sink
from spec_lab.record.summary import build_summary
from spec_lab.record.verify_rows import save_verify_rows
from spec_lab.report.run_table import format_run
from spec_lab.wiring.limits import engine_limits
from spec_lab.workloads.chat_template import NO_TEMPLATE, template_digest
from spec_lab.workloads.checker import Checked
from spec_lab.workloads.text_ends import text_ends

WARMUP_TOKENS = 32


def run(chosen: Chosen, choices: dict[str, str], folder: Path) -> Summary:
    """Do the same as `record_run`, and print the table and the verdict."""
    summary = record_run(chosen, choices, folder)
    print(format_run(summary))
    return summary


def record_run(chosen: Chosen, choices: dict[str, str], folder: Path) -> Summary:
    """Run and record into `folder`.

    Raises:
        UserError: a checkpoint, a prompt set or a size is wrong, which is found before anything is recorded; or the
            logits are not finite, or a checker or another part of an extension fails.
    """
    memory = MemoryWatch.begin()
    with world_of(chosen.config, folder) as world:
        return _record_in(world, chosen, choices, folder, memory)


def _record_in(world: World, chosen: Chosen, choices: dict[str, str], folder: Path, memory: MemoryWatch) -> Summary:
    """Run and record. What is loaded here can be freed when this returns, before the process group is closed."""
    with said_to_go_on("loading prompts and weights"):
        lab = load_lab(chosen, world)
    info = RunInfo(chosen.config.name, choices, dataclasses.asdict(chosen.config), _provenance(lab), utc_now())
    metrics = OwnMetrics(list(chosen.registry.options(MetricOption).values()))
    with Recorder(folder, info, _sinks(chosen), metrics) as recorder:
        summary = _measure(lab, info, recorder, memory, metrics)
        recorder.finish(summary)
    return summary


def _measure(lab: Lab, info: RunInfo, recorder: Recorder, memory: MemoryWatch, metrics: OwnMetrics) -> Summary:
    """Warm up, time the repeats, audit and profile, and return the finished record."""
    config = lab.config
    passes: dict[str, list[GenerationResult]] = {name: [] for name in lab.engines}
    checked: dict[str, dict[str, Checked | None]] = {}
    thinking: dict[str, dict[str, int] | None] = {}
    divergences: list[Divergence] | None = None
    num_requests = config.repeats * len(lab.engines) * len(lab.requests)
    with Progress(num_requests, "request") as progress, _kept_if_interrupted(lab, recorder) as finished:
        _warm_up(lab, progress)
        for repeat in range(config.repeats):
            for name in order_of_turn(list(lab.engines), repeat):
                kept = finished if (repeat, name) == (0, MAIN) else []
                passes[name].append(_timed_pass(lab, name, repeat, progress, kept))
            recorder.rounds(repeat, passes[MAIN][-1].rounds)
            if repeat == 0:
                progress.stage("checking the answers")
                checked = {name: check_answers(lab, name, results[0].requests) for name, results in passes.items()}
                thinking = {name: _count_thinking(lab, results[0].requests) for name, results in passes.items()}
                records = passes[MAIN][0].requests
                for record in progress.counted("checking the outputs", records if config.record.audit else []):
                    lab.teacher.require_finite([*record.prompt_ids, *record.output_ids[:-1]])
                divergences = _audit(lab, passes, progress)
                finished.clear()
                note_unread(records, checked[MAIN])
                _record_requests(lab, recorder, records, checked[MAIN], thinking[MAIN], divergences or [])
        profile = _profile(lab, recorder.folder, progress)
        _keep_verify_rows(lab, passes[MAIN][0].requests, recorder.folder, progress)
    measured = {name: Measured(results, correct_of(checked[name]), thinking[name]) for name, results in passes.items()}
    traits = lab.engines[MAIN].parts.rule.traits
    return build_summary(
        info,
        measured.pop(MAIN),
        measured,
        seconds=recorder.seconds,
        divergences=divergences,
        kernels=profile.kernels,
        work=profile.work,
        acceptance_imposed=traits.imposed,
        acceptance_lossless=traits.lossless,
        row_invariant=lab.models.row_invariant,
        memory=memory.read(lab.models.device),
        metrics=metrics,
    )


def _warm_up(lab: Lab, progress: Progress) -> None:
    """Prepare the engines. Unless `warmup_requests` is 0, also run each once untimed, so that no first call is timed.
    Run plain decoding first if a drafter replays it."""
    _teach(lab, progress)
    progress.stage("warm-up")
    for engine in lab.engines.values():
        engine.prepare()
    if lab.config.warmup_requests == 0:
        return
    # At least a full batch, so that the shapes of full rounds have been run too.
    first = lab.requests[: max(lab.config.warmup_requests, lab.config.batch_size)]
    short = [dataclasses.replace(r, max_new_tokens=min(WARMUP_TOKENS, r.max_new_tokens)) for r in first]
    for engine in lab.engines.values():
        engine.generate(short)


def _teach(lab: Lab, progress: Progress) -> None:
    """Give plain decoding's continuations to every drafter that replays them; each engine has its own drafter."""
    requirements = [engine.parts.drafter.requirements for engine in lab.engines.values()]
    learners = [part.learn_continuations for part in requirements if part.learn_continuations is not None]
    if learners:
        progress.stage("recording plain continuations")
        outputs = _plain_outputs(lab)
        for learn in learners:
            learn(outputs)


def _plain_outputs(lab: Lab) -> dict[str, list[int]]:
    """Return outputs of plain decoding, K tokens longer, since the last round drafts and judges past the limit."""
    num_more = lab.config.drafter.num_draft_tokens
    limits = engine_limits(lab.chosen, lab.requests, num_more)
    longer = dataclasses.replace(
        limits,
        max_seq_len=limits.max_seq_len + num_more,
        margin=limits.margin - num_more,
        max_kv_len=limits.max_kv_len + num_more,
    )
    requests = [dataclasses.replace(r, max_new_tokens=r.max_new_tokens + num_more) for r in lab.requests]
    return _outputs(plain_engine(lab.chosen, lab.models, longer).generate(requests).requests)


def _timed_pass(
    lab: Lab, name: str, repeat: int, progress: Progress, finished: list[RequestRecord]
) -> GenerationResult:
    """Decode all requests with one engine, and add each to `finished` when it ends."""

    def end(record: RequestRecord) -> None:
        finished.append(record)
        progress.advance()

    progress.stage(f"{name}, repeat {repeat + 1} of {lab.config.repeats}")
    gc.collect()
    engine = lab.engines[name]
    before = dataclasses.replace(engine.graph.counts)
    result = engine.generate(lab.requests, on_finish=end)
    check_replayed(before, result, must_replay=name == MAIN and lab.chosen.graph.captures)
    lab.world.require_agreement(result)
    return result


def check_replayed(before: GraphCounts, result: GenerationResult, must_replay: bool) -> None:
    """Raise RuntimeError if a timed pass captured graphs, or ran rounds eagerly that were to be replayed.

    `before`: the counts at the start of the pass; they accumulate over passes.

    `must_replay` is false for references: with graph.verify=false a reference may have nothing to capture. A run that
    captures nothing is refused earlier.
    """
    graph = result.graph
    if graph.captures > before.captures:
        raise RuntimeError(f"graph={graph.mode} captured a graph in a timed pass, which warm-up should have done")
    num_replays = graph.replays - before.replays
    if must_replay and num_replays * graph.rounds_per_replay < len(result.rounds):
        raise RuntimeError(
            f"graph={graph.mode} replayed {num_replays} times in {len(result.rounds)} rounds; use graph=eager"
        )


def _count_thinking(lab: Lab, records: Iterable[RequestRecord]) -> dict[str, int] | None:
    """Count each request's output tokens inside thinking; None if the tokenizer has no thinking markers."""
    markers = lab.models.markers
    if markers is None:
        return None
    return {record.request_id: sum(thinking_mask(record.prompt_ids, record.output_ids, markers)) for record in records}


def _audit(lab: Lab, passes: Mapping[str, list[GenerationResult]], progress: Progress) -> list[Divergence] | None:
    """Compare the outputs with plain decoding's; None with sampling, where they need not be equal, and without
    record.audit."""
    if lab.config.sampling.temperature > 0 or not lab.config.record.audit:
        return None
    plain = _outputs(passes["plain"][0].requests) if "plain" in passes else None
    lossless = lab.engines[MAIN].parts.rule.traits.lossless
    records = progress.counted("comparing the outputs with plain decoding", passes[MAIN][0].requests)
    return audit(records, plain, lab.teacher, lab.models.dtype, lossless)


def _outputs(records: Iterable[RequestRecord]) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in records}


@contextmanager
def _kept_if_interrupted(lab: Lab, recorder: Recorder) -> Iterator[list[RequestRecord]]:
    """Yield a list for finished requests. If Ctrl-C ends the block they are recorded, without an audit, and the record
    says so."""
    finished: list[RequestRecord] = []
    try:
        yield finished
    except BaseException as error:
        if is_interruption(error) and finished:
            error.add_note(f"{len(finished)} requests were decoded and are kept; their outputs were not checked")
            checked, thinking = check_answers(lab, MAIN, finished), _count_thinking(lab, finished)
            _record_requests(lab, recorder, finished, checked, thinking, [])
        raise


def _record_requests(
    lab: Lab,
    recorder: Recorder,
    records: Iterable[RequestRecord],
    checked: Mapping[str, Checked | None],
    thinking: Mapping[str, int] | None,
    divergences: Iterable[Divergence],
) -> None:
    by_request = {divergence.request_id: divergence for divergence in divergences}
    for record in records:
        request_id = record.request_id
        text = lab.tokenizer.decode(record.output_ids)
        answer = checked[request_id]
        recorder.request(
            request_row(
                record,
                text,
                None if answer is None else answer.correct,
                by_request.get(request_id),
                (thinking or {}).get(request_id),
                text_ends(lab.tokenizer, record.output_ids, text),
                None if answer is None else answer.checker,
                None if answer is None else answer.read,
            )
        )


def _profile(lab: Lab, folder: Path, progress: Progress) -> RoundProfile:
    if lab.config.profile_rounds == 0:
        return RoundProfile([], None)
    progress.stage("profiling")
    batch = lab.requests[: lab.config.batch_size]
    return profile_rounds(lab.engines[MAIN], batch, lab.config.profile_rounds, folder)


def _keep_verify_rows(lab: Lab, records: list[RequestRecord], folder: Path, progress: Progress) -> None:
    config, engine = lab.config, lab.engines[MAIN]
    topk = config.record.topk
    if topk == 0:
        return
    progress.stage("recording verify rows")
    requests = fitting(lab.requests, records, engine.num_draft_tokens, topk)
    rows = record_verify_rows(engine, requests, topk, lab.models.markers, config.cache.chunk_size)
    save_verify_rows(folder, rows)


def _provenance(lab: Lab) -> Provenance:
    dtype = str(lab.models.dtype).removeprefix("torch.")
    origins = lab.chosen.registry.origins()
    narrow = lab.config.target.weight_dtype
    is_random, path = lab.config.target.weights == Weights.random, lab.chosen.target_folder
    return collect_provenance(
        str(lab.models.device),
        dtype,
        torch.get_num_threads(),
        origins,
        lab.world.size,
        weight_dtype=dtype if narrow == WeightDtype.auto else str(narrow),
        stored_types=quantizations(path) if is_gguf(path) and not is_random else None,
        template=NO_TEMPLATE if is_random else template_digest(path),
        target_digest=None if is_random else target_digest(path),
        thinking_markers=lab.models.markers is not None,
    )


def _sinks(chosen: Chosen) -> list[Sink]:
    return chosen.logger.sinks(chosen.config.logger)
