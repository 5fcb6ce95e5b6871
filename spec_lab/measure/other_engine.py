"""Runs and records a run of another engine: the same requests, turns, checks and record as the lab's own.

The lab loads its target too, to say where the tokens part from its own plain decoding and by which margin.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from spec_lab.build.models import LastModels
from spec_lab.build.references import plain_config
from spec_lab.config.run import EngineConfig, Run
from spec_lab.core.errors import Breakdown, UserError
from spec_lab.core.results import GenerationResult, GraphCounts, RequestRecord
from spec_lab.core.types import FinishReason, Request
from spec_lab.engines.plan import EngineFile, Plan, plain_settings
from spec_lab.engines.process import EngineProcess
from spec_lab.measure.audit import audit
from spec_lab.measure.lab import MAIN, LoadedRun, load_lab
from spec_lab.measure.runner import WARMUP_TOKENS, identity, offered_requests, order_of_turn, request_rows
from spec_lab.record import models
from spec_lab.record.draft_counts import RoundTotals
from spec_lab.record.metric import EXTENSION_METRICS, Measured
from spec_lab.record.models import Divergence
from spec_lab.record.models import Request as RequestRow
from spec_lab.record.progress import Progress, announced
from spec_lab.record.recorder import Recorder, begun
from spec_lab.record.summary import finished_run
from spec_lab.workloads.tokenizer import Tokenizer

PLAIN = "plain"
LOG_FILE = "engine.log"
Answers = dict[str, dict[str, Any]]


@dataclasses.dataclass(slots=True)
class EnginePass:
    """One timed pass of an engine: what it gave, the answers as it told them, and its counts of the whole pass."""

    result: GenerationResult
    answers: Answers
    totals: RoundTotals | None
    told: dict[str, float | None]


def record_engine_run(config: Run, choices: dict[str, str], folder: Path, last: LastModels | None = None) -> models.Run:
    """Run another engine and record into `folder`, as `runner.record_run` does for the lab.

    Raises:
        UserError: the engine cannot be started, or has no files that it reads.
        Breakdown: the engine failed later.
    """
    plan = config.engine.plan(config)
    assert isinstance(plan, Plan), "refused before"
    with announced("loading prompts and weights"):
        lab = load_lab(plain_config(config).with_parts(engine=EngineConfig(), references=[]), last=last)
    if foreign := [request.request_id for request in lab.requests if request.has_stops]:
        raise UserError(f"engine={config.engine.name} is not told of the stops of prompt {foreign[0]}; leave them out")
    with ExitStack() as open_:
        engines = _started(config, plan, lab, folder, open_)
        info = begun(dataclasses.asdict(config), choices).model_copy(
            update={
                **identity(lab),
                "engine": config.engine.name,
                "engine_version": engines[MAIN].version,
                "notes": plan.notes,
            }
        )
        recorder = open_.enter_context(Recorder(folder, info, config.logger.sinks()))
        recorded = _measure(config, plan, lab, engines, info, recorder)
        recorder.finish(recorded)
    return recorded


def _started(config: Run, plan: Plan, lab: LoadedRun, folder: Path, open_: ExitStack) -> dict[str, EngineProcess]:
    """Start the engine, and its plain decoding as a reference, and close both with `open_`."""
    from spec_lab.options.engines import engine_file

    engine: Any = config.engine
    file: EngineFile = engine_file(engine.name)
    scratch = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="spec_lab-")))
    typed = dataclasses.replace(config, dtype=type(config.dtype)(str(lab.models.dtype).removeprefix("torch.")))
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in lab.requests)
    settings = {
        **plan.settings,
        **file.files(typed, scratch),
        "device": str(lab.models.device),
        "dtype": str(typed.dtype),
        "eos_ids": sorted(lab.models.target.eos_token_ids),
        "num_threads": torch.get_num_threads(),
        "max_seq_len": longest + plan.num_draft_tokens,
        "timeout": engine.timeout,
    }
    parts = {MAIN: settings}
    if PLAIN in config.references and config.drafter.drafts and (plain := plain_settings(settings)) is not None:
        parts[PLAIN] = plain
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, told in parts.items():
        with announced(f"starting {plan.knobs.engine}, {name}"):
            process = EngineProcess(plan.knobs, engine.python, told, folder / LOG_FILE)
            found[name] = open_.enter_context(closing(process))
    return found


def _measure(
    config: Run, plan: Plan, lab: LoadedRun, engines: Mapping[str, EngineProcess], info: models.Run, recorder: Recorder
) -> models.Run:
    """Warm up, time the repeats in turns, compare the outputs, and return the finished record."""
    offered = offered_requests(dataclasses.replace(lab, config=config))
    passes: dict[str, list[EnginePass]] = {name: [] for name in engines}
    with Progress(config.repeats * len(engines) * len(offered), "request") as progress:
        progress.stage("warm-up")
        first = lab.requests[: max(config.warmup_requests, config.batch_size)] if config.warmup_requests else []
        short = [dataclasses.replace(r, max_new_tokens=min(WARMUP_TOKENS, r.max_new_tokens)) for r in first]
        for engine in engines.values() if short else ():
            timed_pass(engine, short, lab.tokenizer, plan.num_draft_tokens, lambda record: None)
        for repeat in range(config.repeats):
            for name in order_of_turn(list(engines), repeat):
                progress.stage(f"{name}, repeat {repeat + 1} of {config.repeats}")

                def end(record: RequestRecord, keep: bool = (repeat, name) == (0, MAIN)) -> None:
                    if keep:
                        recorder.decoded(record)
                    progress.advance()

                k = plan.num_draft_tokens if name == MAIN else 0
                passes[name].append(timed_pass(engines[name], offered, lab.tokenizer, k, end))
        from_plain, from_lab = _compared(config, lab, passes, progress)
    rows = {
        name: _rows(lab, done[0], *((from_plain, from_lab) if name == MAIN else (None, None)))
        for name, done in passes.items()
    }
    recorder.requests(rows[MAIN])

    def measured(name: str) -> Measured:
        done = passes[name]
        k = plan.num_draft_tokens if name == MAIN else 0
        results = [each.result for each in done]
        return Measured(rows[name], results, k, is_ours=False, totals=done[0].totals, told=done[0].told)

    main = dataclasses.replace(
        measured(MAIN),
        references={PLAIN: measured(PLAIN)} if PLAIN in passes else {},
        is_compared=from_plain is not None,
        beside_lab=from_lab is not None,
    )
    notes = list(info.notes)
    if not all(answer["tells_ids"] for answer in passes[MAIN][0].answers.values()):
        notes.append("the engine tells no token ids, so those of the record are its texts', encoded again")
    lossless = config.acceptance.keeps_greedy_text or config.acceptance.keeps_the_law
    return finished_run(
        info,
        main,
        list(EXTENSION_METRICS.values()),
        acceptance_lossless=lossless,
        seconds=recorder.seconds,
        notes=notes,
    )


def timed_pass(
    engine: EngineProcess,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    num_draft_tokens: int,
    end: Callable[[RequestRecord], None],
) -> EnginePass:
    """Have an engine decode the requests, and call `end` with each when it is complete. If it tells no token ids, they
    are those of the text, which may be others.

    Raises:
        Breakdown: the engine failed, or did not answer all of them.
    """
    by_id, answers = {request.request_id: request for request in requests}, Answers()
    records: dict[str, RequestRecord] = {}

    def say(answer: dict[str, Any]) -> None:
        answer["tells_ids"] = answer["output_ids"] is not None
        if not answer["tells_ids"]:
            answer["output_ids"] = tokenizer.encode(answer["text"])
        answers[answer["id"]] = answer
        records[answer["id"]] = record_of(by_id[answer["id"]], answer)
        end(records[answer["id"]])

    asked = [
        {
            "id": request.request_id,
            "prompt_ids": list(request.prompt_ids),
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.ignore_eos,
            "arrives_at": request.arrives_at,
        }
        for request in requests
    ]
    done = engine.generate(asked, say)
    if silent := [name for name in by_id if name not in records]:
        raise Breakdown(f"the engine did not answer {len(silent)} of {len(by_id)} requests, such as {silent[0]}")
    result = GenerationResult(
        requests=[records[name] for name in by_id],
        rounds=[],
        prefills=[],
        graph=GraphCounts(),
        num_draft_tokens=num_draft_tokens,
        seconds=done["seconds"],
    )
    counts = done.get("totals")
    if counts is not None and counts.get("by_position") is not None:
        counts["by_position"] = tuple(counts["by_position"])
    totals = None if done.get("totals") is None else RoundTotals(**done["totals"])
    return EnginePass(result, answers, totals, done.get("told") or {})


def record_of(request: Request, answer: Mapping[str, Any]) -> RequestRecord:
    """Make the record of a request from an engine's answer. Lists that the engine does not tell are empty."""
    emitted = answer.get("emitted") or []
    return RequestRecord(
        request_id=request.request_id,
        category=request.category,
        prompt_ids=list(request.prompt_ids),
        output_ids=answer["output_ids"],
        token_origins="",
        answer=request.answer,
        offered_per_round=answer.get("offered") or [],
        accepted_per_round=answer.get("accepted") or [],
        judged_per_round=answer.get("judged") or [],
        emitted_per_round=emitted,
        truncated=bool(emitted) and emitted[-1] < answer["accepted"][-1] + 1,
        finish_reason=FinishReason(answer["finish_reason"]),
        max_new_tokens=request.max_new_tokens,
        admitted_at=answer.get("admitted_at") or 0.0,
        emitted_at=answer.get("emitted_at") or [],
        arrived_at=answer.get("arrived_at") or 0.0,
        turn=request.turn,
    )


def _rows(
    lab: LoadedRun,
    done: EnginePass,
    from_plain: Mapping[str, Divergence] | None,
    from_lab: Mapping[str, Divergence] | None,
) -> list[RequestRow]:
    """Make the records of the requests, with null for what the engine does not tell."""
    rows = []
    for row in request_rows(lab, MAIN, done.result.requests, from_plain or {}):
        answer = done.answers[row.id]
        told = {f"{name}_per_round": answer.get(name) for name in ("offered", "accepted", "judged", "emitted")}
        told |= {name: answer.get(name) for name in ("arrived_at", "admitted_at", "emitted_at")}
        histogram = answer.get("histogram")
        told |= {"rounds_histogram": None if histogram is None else list(map(tuple, histogram)), "token_origins": None}
        if told["emitted_per_round"] is None:
            told["truncated"] = None
        rows.append(row.model_copy(update={**told, "lab_divergence": (from_lab or {}).get(row.id)}))
    return rows


def _compared(
    config: Run, lab: LoadedRun, passes: Mapping[str, list[EnginePass]], progress: Progress
) -> tuple[dict[str, Divergence] | None, dict[str, Divergence] | None]:
    """Compare the outputs with the same engine's plain decoding and with the lab's; None where that is not asked for,
    and with sampling, where they need not be equal."""
    told = all(answer["tells_ids"] for done in passes.values() for answer in done[0].answers.values())
    if config.sampling.temperature > 0 or not config.record.audit or not told:
        return None, None
    records, dtype = passes[MAIN][0].result.requests, lab.models.dtype
    from_plain = None
    if PLAIN in passes:
        plain = {record.request_id: record.output_ids for record in passes[PLAIN][0].result.requests}
        from_plain = audit(records, plain, lab.teacher, dtype)
    counted = progress.counted("comparing the outputs with the lab's", records)
    return from_plain, audit(counted, None, lab.teacher, dtype)
