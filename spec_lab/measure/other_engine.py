"""Runs and records a run of another engine: the same requests, turns, checks and record as the lab's own.

The lab loads its target too, to say where the tokens part from its own plain decoding and by which margin.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from spec_lab.build.models import Last, resolve_device, resolve_dtype
from spec_lab.build.workloads import open_workload
from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.groups import EngineConfig
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.engines.plan import EnginePlan, plain_settings
from spec_lab.engines.process import EngineProcess
from spec_lab.measure.audit import audit
from spec_lab.measure.engine_pass import EnginePass, timed_pass
from spec_lab.measure.lab import MAIN, LoadedRun, default_num_threads, load_lab, plain_config
from spec_lab.measure.runner import identity, in_turns, offered_requests, request_rows, warmup_requests
from spec_lab.options.engines import OtherEngine, engine_file
from spec_lab.record import models
from spec_lab.record.metric import Measured
from spec_lab.record.models import Divergence
from spec_lab.record.models import Request as RequestRow
from spec_lab.record.progress import counted, progress_of
from spec_lab.record.recorder import Recorder, begun, request_row
from spec_lab.record.summary import finished_run
from spec_lab.workloads.tokenizer import Tokenizer

PLAIN = "plain"
LOG_FILE = "engine.log"


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """What the lab holds beside an engine.

    Attributes:
        lab: the lab's plain decoding of the target; None with record.audit=false, where the lab reads only the
            target's configuration and tokenizer, since it may not fit into this machine.
    """

    lab: LoadedRun | None
    tokenizer: Tokenizer
    requests: list[Request]
    device: torch.device
    dtype: torch.dtype
    eos_ids: list[int]

    @classmethod
    def load(cls, config: Run, last: Last | None) -> Beside:
        """Read the prompts, and load the target unless record.audit=false.

        Raises:
            UserError: a prompt has what engines are not told, or needs answers of the lab.
        """
        plain = dataclasses.replace(plain_config(config), engine=EngineConfig(), references=[])
        if config.record.audit:
            lab = load_lab(plain, last=last)
            target = lab.models.target
            ids = sorted(target.eos_token_ids)
            found = cls(lab, lab.tokenizer, lab.requests, lab.models.device, dtype=lab.models.dtype, eos_ids=ids)
        else:
            tokenizer, requests = open_workload(plain)
            if long := [request.request_id for request in requests if len(request.turns) > 1]:
                raise UserError(f"record.audit=false: the lab answers the first turns of {long[0]}; use true")
            device = resolve_device(config.device)
            ends = sorted(read_model_config(config.target.folder).eos_token_ids)
            found = cls(None, tokenizer, requests, device, dtype=resolve_dtype(config.dtype, device), eos_ids=ends)
        if foreign := [request.request_id for request in found.requests if request.has_stops]:
            raise UserError(f"engine={config.engine.name} is not told of the stops of {foreign[0]}; leave them out")
        return found

    def rows(self, records: Sequence[RequestRecord], divergences: Mapping[str, Divergence]) -> list[RequestRow]:
        """Make the records of requests; answers are checked where the lab's target is loaded."""
        if self.lab is not None:
            return request_rows(self.lab, MAIN, records, divergences)
        return [request_row(record, text=self.tokenizer.decode(record.output_ids)) for record in records]


def record_engine_run(config: Run, choices: dict[str, str], folder: Path, last: Last | None = None) -> models.Run:
    """Run another engine and record into `folder`, as `runner.record_run` does for the lab.

    Raises:
        UserError: the engine cannot be started, or has no files that it reads.
        Breakdown: the engine failed later.
    """
    assert isinstance(config.engine, OtherEngine)
    plan = config.engine.plan(config)
    assert isinstance(plan, EnginePlan), "refused before"
    print("loading prompts and weights ...", file=sys.stderr, flush=True)
    beside = Beside.load(config, last)
    with ExitStack() as open_:
        engines = _started(config, plan, beside, folder, open_)
        known = identity(
            config, beside.device, beside.dtype, num_threads_of(config, beside), has_weights=beside.lab is not None
        )
        told = {"engine": config.engine.name, "engine_version": engines[MAIN].version, "notes": plan.notes}
        info = begun(dataclasses.asdict(config), choices, **{**known, **told})
        recorder = open_.enter_context(Recorder.open(folder, info, config.logger.sinks()))
        recorded = _measure(config, plan, beside, engines, info, recorder)
        recorder.finish(recorded)
    return recorded


def _started(config: Run, plan: EnginePlan, beside: Beside, folder: Path, open_: ExitStack) -> dict[str, EngineProcess]:
    """Start the engine, and its plain decoding as a reference, and close both with `open_`."""
    engine: Any = config.engine
    scratch = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="spec_lab-")))
    typed = dataclasses.replace(config, dtype=type(config.dtype)(str(beside.dtype).removeprefix("torch.")))
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in beside.requests)
    settings = {
        **plan.settings,
        **engine_file(engine.name).files(typed, scratch),
        "device": str(beside.device),
        "dtype": str(typed.dtype),
        "eos_ids": beside.eos_ids,
        "num_threads": num_threads_of(config, beside),
        "max_seq_len": longest + plan.num_draft_tokens,
        "timeout": engine.timeout,
    }
    parts = {MAIN: settings}
    if PLAIN in config.references and config.drafter.drafts and (plain := plain_settings(settings)) is not None:
        parts[PLAIN] = plain
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, told in parts.items():
        print(f"starting {plan.knobs.engine}, {name} ...", file=sys.stderr, flush=True)
        process = EngineProcess(plan.knobs, engine.python, told, folder / LOG_FILE)
        found[name] = open_.enter_context(closing(process))
    return found


def num_threads_of(config: Run, beside: Beside) -> int:
    """Return the number of CPU threads of the engine."""
    return torch.get_num_threads() if beside.lab else config.num_threads or default_num_threads(config)


def _measure(
    config: Run,
    plan: EnginePlan,
    beside: Beside,
    engines: Mapping[str, EngineProcess],
    info: models.Run,
    recorder: Recorder,
) -> models.Run:
    """Warm up, time the repeats in turns, compare the outputs, and return the finished record."""
    offered = offered_requests(config, beside.requests)
    num_drafts = {name: plan.num_draft_tokens if name == MAIN else 0 for name in engines}

    def timed(name: str, end: Callable[[RequestRecord], None]) -> EnginePass:
        return timed_pass(engines[name], offered, beside.tokenizer, num_drafts[name], config.seed, end)

    with progress_of(config.repeats * len(engines) * len(offered)) as progress:
        progress.set_description("warm-up")
        if short := warmup_requests(config, beside.requests):
            for engine in engines.values():
                timed_pass(engine, short, beside.tokenizer, plan.num_draft_tokens, config.seed, lambda record: None)
        for repeat, passes in enumerate(in_turns(config, list(engines), progress, recorder, timed)):
            if repeat > 0:
                continue
            from_plain, from_lab = _compared(config, beside.lab, passes, progress)
            rows = {
                name: _rows(beside, done[0], *((from_plain, from_lab) if name == MAIN else (None, None)))
                for name, done in passes.items()
            }
            recorder.requests(rows[MAIN])

    measured = {
        name: Measured(
            rows[name],
            [each.result for each in done],
            num_drafts[name],
            is_ours=False,
            totals=done[0].totals,
            told=done[0].told,
        )
        for name, done in passes.items()
    }
    main = dataclasses.replace(
        measured.pop(MAIN),
        references=measured,
        is_compared=from_plain is not None,
        beside_lab=from_lab is not None,
    )
    notes = list(info.notes)
    if not passes[MAIN][0].tells_ids:
        notes.append("the engine tells no token ids, so those of the record are its texts', encoded again")
    lossless = config.acceptance.keeps_greedy_text or config.acceptance.keeps_the_law
    return finished_run(
        info,
        main,
        acceptance_lossless=lossless,
        seconds=recorder.seconds,
        notes=notes,
    )


def _rows(
    beside: Beside,
    done: EnginePass,
    from_plain: Mapping[str, Divergence] | None,
    from_lab: Mapping[str, Divergence] | None,
) -> list[RequestRow]:
    """Make the records of the requests, with null for what the engine does not tell."""
    rows = []
    for row in beside.rows(done.result.requests, from_plain or {}):
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
    config: Run, lab: LoadedRun | None, passes: Mapping[str, list[EnginePass]], progress: tqdm
) -> tuple[dict[str, Divergence] | None, dict[str, Divergence] | None]:
    """Compare the outputs with the same engine's plain decoding and with the lab's; None where that is not asked for,
    and with sampling, where they need not be equal."""
    if config.sampling.temperature > 0 or lab is None or not all(done[0].tells_ids for done in passes.values()):
        return None, None
    records, dtype = passes[MAIN][0].result.requests, lab.teacher.rounds_to
    from_plain = None
    if PLAIN in passes:
        plain = {record.request_id: record.output_ids for record in passes[PLAIN][0].result.requests}
        from_plain = audit(records, plain, lab.teacher, dtype)
    shown = counted(progress, "comparing the outputs with the lab's", records)
    return from_plain, audit(shown, None, lab.teacher, dtype)
