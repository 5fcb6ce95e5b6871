"""The checks of a command line: what would give a wrong number in silence, or fail after minutes of work.

A check yields a line that names the knob and the remedy. The checks of one option are in its class (`Part.check`).
Checks that read a checkpoint are in `spec_lab.build`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from operator import attrgetter, ge, gt, le
from typing import Any

from spec_lab.config.choices import CacheDtype, Dtype, KernelsChoice, WeightDtype
from spec_lab.config.option import VALUES, get
from spec_lab.config.run import GROUPS, Run
from spec_lab.core.errors import UserError
from spec_lab.core.ranks import ranks

WITHIN = {"at least": ge, "at most": le, "above": gt}
"""The bounds of a knob. NaN is within none."""


def admit(run: Run) -> Run:
    """Return the run; UserError with all that speaks against it, a line each."""
    if found := list(dict.fromkeys(problems(run))):
        raise UserError("\n".join(found))
    return run


def problems(run: Run) -> Iterator[str]:
    """Yield everything that speaks against a run: bounds, the options' own checks, missing files, and what cannot be
    combined."""
    yield from out_of_bounds(run)
    for group in GROUPS:
        yield from getattr(run, group).check(run)
    for check in (_missing, _rules, _trees, _offers, _turns, _graphs, _kernels, _ranks):
        yield from check(run)


def out_of_bounds(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for each number of `config`, a dataclass instance, that its knob does not take."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from out_of_bounds(value, f"{name}.")
            continue
        bounds = field.metadata.get("bounds", {})
        numbers = [number for number in (value if isinstance(value, list) else [value]) if type(number) in (int, float)]
        if not all(WITHIN[word](number, bound) for number in numbers for word, bound in bounds.items()):
            yield f"{name}={value} must be {' and '.join(f'{word} {bound}' for word, bound in bounds.items())}"


def _missing(run: Run) -> Iterator[str]:
    """The files that options read are there, and so are the options that knobs name."""
    files = [partial(getattr(run, group).files, run) for group in GROUPS]
    for look in (*files, *(partial(get, group, attrgetter(group)(run)) for group in VALUES)):
        try:
            look()
        except UserError as error:
            yield str(error)


def lossless_rule(run: Run) -> str:
    """Return the overrides that choose a lossless rule for the run's temperature. Checks suggest them."""
    is_greedy = run.sampling.temperature <= 0
    return "acceptance=strict" if is_greedy else "acceptance=rejection acceptance.method=one_hot"


def _rules(run: Run) -> Iterator[str]:
    """Drafts, rule and sampling fit each other, so that the output has the distribution that the rule promises."""
    drafter, rule, temperature = run.drafter, run.acceptance, run.sampling.temperature
    if rule.greedy_only is not None and temperature > 0:
        yield (
            f"acceptance={rule.name} {rule.greedy_only}, but sampling.temperature={temperature} samples; use "
            f"sampling.temperature=0 or {lossless_rule(run)}"
        )
    if drafter.follows_greedy_text is not None and (temperature > 0 or not rule.keeps_greedy_text):
        yield (
            f"drafter={drafter.name} {drafter.follows_greedy_text}, but sampling.temperature={temperature} "
            f"acceptance={rule.name} may emit another text; use sampling.temperature=0 acceptance=strict"
        )
    if run.draws_drafts and temperature <= 0:
        yield (
            "drafter.draft_sampling=distribution draws at sampling.temperature, which is 0; use "
            "drafter.draft_sampling=greedy, or sampling.temperature=1 acceptance=rejection"
        )


def _trees(run: Run) -> Iterator[str]:
    """All parts of a run with a tree can handle trees, and K is the depth."""
    sizes, tree = run.sizes, run.tree.name
    if sizes is None:
        return
    lacking = {
        f"drafter={run.drafter.name}": run.drafter.drafts_trees,
        f"acceptance={run.acceptance.name}": run.acceptance.judges_trees,
        f"attention={run.attention.name}": run.attention.masks_trees,
        f"graph={run.graph.name}": run.graph.runs_trees,
        f"record.topk={run.record.topk}": run.record.topk == 0,
    }
    for knob in (knob for knob, is_able in lacking.items() if not is_able):
        yield f"{knob} is for chains, not tree={tree}; use tree=none"
    if run.drafter.num_draft_tokens != sizes.depth:
        yield (
            f"drafter.num_draft_tokens={run.drafter.num_draft_tokens} is not the depth of tree={tree}, {sizes.depth}, "
            f"which is K; use drafter.num_draft_tokens={sizes.depth}"
        )


def _offers(run: Run) -> Iterator[str]:
    """Where a request may offer fewer than K drafts, every part of the run knows how many."""
    drafter, fewer = run.drafter, run.fewer_drafts
    if fewer is None:
        return
    if not run.acceptance.takes_fewer_drafts:
        rule = run.acceptance.name
        yield f"{fewer} leaves out drafts, which acceptance={rule} would not see; use {lossless_rule(run)}"
    if run.record.topk > 0:
        yield f"record.topk={run.record.topk} needs all drafts to be offered, not {fewer}; use record.topk=0"
    if drafter.plan == "cost" and drafter.drafts_on_host:
        yield f"drafter.plan=cost does not know how much drafter={drafter.name} finds; use drafter.plan=none"
    if drafter.plan == "cost" and run.target.tensor_parallel > 1:
        yield "drafter.plan=cost would choose by other times in each process; use drafter.plan=none"
    if drafter.plan != "none" and run.sizes is not None and (drafter.plan, run.tree.name) != ("cost", "dynamic"):
        yield f"{fewer} is for chains, not tree={run.tree.name}; use tree=none"


def _turns(run: Run) -> Iterator[str]:
    """What takes turns with the run has chains that its positions have room for."""
    most = run.drafter.num_draft_tokens
    if run.fixed_k and (max(run.fixed_k) > most or run.sizes is not None):
        yield f"fixed_k={run.fixed_k} must be chains of at most drafter.num_draft_tokens={most} drafts, with tree=none"
    if run.fixed_k and run.acceptance.name == "synthetic":
        yield "fixed_k needs the acceptance of one head at every K; use acceptance=replay instead of synthetic"
    if run.fixed_k and run.engine.name != "lab":
        yield f"fixed_k is not measured with engine={run.engine.name}; sweep drafter.num_draft_tokens"


def _graphs(run: Run) -> Iterator[str]:
    """Nothing needs the host where a graph leaves it out."""
    graph, drafter = run.graph, run.drafter
    if run.record.topk > 0 and graph.captures:
        yield f"record.topk={run.record.topk} reads rows between the stages of graph={graph.name}; use graph=eager"
    if run.fewer_drafts is not None and graph.rounds_per_replay > 1:
        yield (
            f"{run.fewer_drafts} needs the host before every round, but graph.rounds_per_replay="
            f"{graph.rounds_per_replay} runs rounds without it; use graph.rounds_per_replay=1"
        )
    if drafter.drafts_on_host and graph.overlap:
        yield f"drafter={drafter.name} needs tokens that graph.overlap=true reads late; use graph.overlap=false"
    if getattr(graph, "prompts", False) and (
        not drafter.ingests_in_graphs or run.sizes is not None or run.fewer_drafts is not None
    ):
        yield "graph.prompts=true captures prompts of chains of K drafts alone, not this run's; use graph.prompts=false"


def _kernels(run: Run) -> Iterator[str]:
    """Kernels compute what the run asks for, in the types that they are right for."""
    wrong = {
        f"dtype={run.dtype}": run.dtype not in (Dtype.auto, Dtype.float32),
        f"attention={run.attention.name}": run.attention.name not in ("auto", "torch"),
        f"tree={run.tree.name}": run.sizes is not None,
        f"target.tensor_parallel={run.target.tensor_parallel}": run.target.tensor_parallel > 1,
        "cache.dtype=fp8": CacheDtype.fp8 in (run.cache.dtype, run.cache.drafter_dtype),
    }
    for knob in (knob for knob, is_wrong in wrong.items() if is_wrong and run.kernels == KernelsChoice.native):
        yield f"kernels=native is for float32 chains on a CPU, not {knob}; use kernels=torch"
    narrow = run.target.weight_dtype
    if narrow not in (WeightDtype.auto, WeightDtype.bfloat16) and run.target.tensor_parallel > 1:
        yield f"target.weight_dtype={narrow} cannot be split; use target.tensor_parallel=1"


def _ranks(run: Run) -> Iterator[str]:
    """There is one process for each part of the target, each with a GPU of its own."""
    wanted, started = run.target.tensor_parallel, ranks().size
    if wanted != started:
        yield (
            f"target.tensor_parallel={wanted}, but {started} processes were started; start torchrun --nproc-per-node "
            f"{wanted} -m spec_lab, or use target.tensor_parallel={started}"
        )
