"""What an engine can be asked for: its row of the table of knobs, and the plan of a run, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from spec_lab.config.run import Run


@dataclass(frozen=True, slots=True)
class Knobs:
    """A row of the table of knobs: what an engine has of the lab's options.

    Attributes:
        engine: its name, as in `engine=NAME`.
        package: the package that its worker imports; empty if it needs none.
        install: the command that installs it.
        drafters: the engine's name of each of the lab's drafters that it has.
        rules: the engine's words for `strict`, and for the methods of `acceptance=rejection`.
        trees: the options of `tree` that it has beside `none`.
        batches: whether it decodes several requests together.
        arrivals: whether requests can arrive while it decodes.
        ignores_eos: whether it can go on after the end of sequence with the tokens of plain decoding.
    """

    engine: str
    package: str
    install: str
    drafters: Mapping[str, str]
    rules: Mapping[str, str]
    trees: tuple[str, ...] = ()
    batches: bool = True
    arrivals: bool = False
    ignores_eos: bool = True


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine is asked for.

    Attributes:
        settings: for its worker, plain values only.
        num_draft_tokens: K.
        notes: how the engine's options differ from the lab's of that name, for the record.
    """

    knobs: Knobs
    settings: dict[str, Any]
    num_draft_tokens: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an engine cannot do a run: a line with knob and remedy for each reason."""

    reasons: tuple[str, ...]


class EngineFile(Protocol):
    """The lab's side of a file of this folder. `settings` adds to the common ones, and to the notes."""

    KNOBS: Knobs

    def refusals(self, run: Run) -> Iterator[str]:
        """Yield what the table does not say of why the engine cannot do the run."""
        ...

    def settings(self, run: Run, notes: list[str]) -> dict[str, Any]:
        """Return what the worker is told beside the common settings."""
        ...

    def files(self, run: Run, scratch: Path) -> dict[str, Any]:
        """Return `target` and `head`, the files that the engine reads; write into `scratch` those of other formats.

        Raises:
            UserError: there is no form that the engine reads.
        """
        ...


def plan_of(run: Run, engine: EngineFile) -> EnginePlan | Refusal:
    """EnginePlan a run for an engine, from its row of the table and before anything loads."""
    knobs = engine.KNOBS
    if reasons := (*_reasons(run, knobs), *engine.refusals(run)):
        return Refusal(reasons)
    config: Any = run.engine
    notes: list[str] = []
    settings = {
        "engine": knobs.engine,
        "method": knobs.drafters.get(run.drafter.name),
        "num_draft_tokens": run.drafter.num_draft_tokens,
        "rule": knobs.rules.get(rule_of(run)),
        "temperature": run.sampling.temperature,
        "top_k": run.sampling.top_k,
        "top_p": run.sampling.top_p,
        "batch_size": run.batch_size,
        "graphs": run.graph.name != "eager",
        "device": run.device,
        "seed": run.seed,
        "options": dict(config.options),
    }
    settings |= engine.settings(run, notes)
    return EnginePlan(knobs, settings, run.drafter.num_draft_tokens, notes)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of the same engine's plain decoding; None for a server without such a twin."""
    if "url" in settings and settings["plain_url"] is None:
        return None
    url = {"url": settings["plain_url"]} if "url" in settings else {}
    return {**settings, **url, "method": None, "num_draft_tokens": 0, "head": None, "rule": None}


def rule_of(run: Run) -> str:
    """Return the row of the table for the run's rule: a method of `acceptance=rejection`, or else the rule's name."""
    rule: Any = run.acceptance
    return str(rule.method) if rule.name == "rejection" else rule.name


def _reasons(run: Run, knobs: Knobs) -> Iterator[str]:
    """Yield why the engine cannot do the run: what it lacks, and what is a choice of the lab's own round."""
    name, drafter, rule = f"engine={knobs.engine}", run.drafter, run.acceptance
    if drafter.drafts and drafter.name not in knobs.drafters:
        yield f"{name} has no drafter={drafter.name}; use one of {', '.join(knobs.drafters)}, or engine=lab"
    if drafter.drafts and rule_of(run) not in knobs.rules:
        yield f"{name} has no rule like acceptance={rule.name}{_method(rule)}; use acceptance=strict or engine=lab"
    if run.sizes is not None and run.tree.name not in knobs.trees:
        yield f"{name} has no tree={run.tree.name}; use tree=none, or engine=lab"
    if run.batch_size > 1 and not knobs.batches:
        yield f"{name} decodes one request at a time, not batch_size={run.batch_size}; use batch_size=1"
    if run.workload.request_rate is not None and not knobs.arrivals:
        yield f"{name} is given all requests at once, so workload.request_rate has no effect; use null"
    if run.workload.ignore_eos and not knobs.ignores_eos:
        yield f"{name} would choose other tokens than plain decoding with workload.ignore_eos=true; use false"
    ours = {
        f"prune.prefill={run.prune.prefill}": run.prune.prefill != "all_rows",
        f"prune.catchup={run.prune.catchup}": run.prune.catchup != "none",
        f"graph={run.graph.name}": run.graph.name not in ("auto", "eager"),
        f"target.weights={run.target.weights}": run.target.weights != "checkpoint",
        f"target.weight_dtype={run.target.weight_dtype}": run.target.weight_dtype != "auto",
        f"drafter.weights={getattr(drafter, 'weights', None)}": getattr(drafter, "weights", None) == "random",
        f"target.tensor_parallel={run.target.tensor_parallel}": run.target.tensor_parallel > 1,
        f"drafter.plan={drafter.plan}": drafter.plan != "none",
        f"drafter.window={getattr(drafter, 'window', None)}": getattr(drafter, "window", None) is not None,
        f"record.topk={run.record.topk}": run.record.topk > 0,
        "workload.stop": bool(run.workload.stop or run.workload.stop_token_ids),
    }
    for knob in (knob for knob, is_set in ours.items() if is_set):
        yield f"{knob} is a choice of the lab's own round, which {name} does not have; leave it out, or use engine=lab"


def _method(rule: Any) -> str:
    return f" acceptance.method={rule.method}" if rule.name == "rejection" else ""
