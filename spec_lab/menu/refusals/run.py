"""Refuses settings that cannot work, before anything is loaded.

Each check takes a `Chosen` run and returns None, or one line that names the knob and the remedy. Its docstring states
the requirement. Some settings that change nothing are refused, but not `prune=catchup` with a drafter that has no
catch-up step. It is a logged no-op, so that sweeps compose. Mistakes that only loaded files show (in shapes,
tokenizers, prompt lengths) are refused when they are loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from spec_lab.core.errors import UserError
from spec_lab.menu.bounds import out_of_bounds
from spec_lab.menu.choices import Dtype
from spec_lab.menu.chosen import Chosen, choose
from spec_lab.menu.config import RunConfig
from spec_lab.menu.option import Option, WorkloadOption
from spec_lab.menu.refusals.drafters import DRAFTER_CHECKS, lossless_rule
from spec_lab.menu.refusals.graphs import GRAPH_CHECKS
from spec_lab.menu.refusals.kernels import KERNEL_CHECKS
from spec_lab.menu.refusals.offers import OFFER_CHECKS
from spec_lab.menu.refusals.ranks import RANK_CHECKS
from spec_lab.menu.refusals.trees import TREE_CHECKS
from spec_lab.menu.refusals.weights import WEIGHT_CHECKS
from spec_lab.menu.registry import KNOBS

NUM_RESERVED_PAGES = 2  # as in core.kv_cache, which imports torch; a test checks that they are equal
MAX_RECORDED_TOPK = 128
MOST_THREADS_A_CORE = 8
# Far below this temperature, float32 logits overflow when divided by it. Not far below this top_p, rounding decides
# which tokens are kept. Long before that, usually only the likeliest token remains.
LEAST_TEMPERATURE = 1e-6
LEAST_TOP_P = 1e-6
DEVICES = ("auto", "cpu", "cuda")

Check = Callable[[Chosen], str | None]


def admit(config: RunConfig) -> Chosen:
    """Return the choices of a run that may start; UserError with the refusals, a line each, if it may not."""
    chosen = choose(config)
    found = problems(chosen)
    if found:
        raise UserError("\n".join(found))
    return chosen


def refusals(config: RunConfig) -> list[str]:
    """Return the refusals of the run, a line each; empty if it may start."""
    try:
        return problems(choose(config))
    except UserError as error:
        return [str(error)]


def problems(chosen: Chosen) -> list[str]:
    """Return the refusals by the bounds of knobs, by the lab's checks and by the chosen options, a line each."""
    config = chosen.config
    own = (said_by(row, refusal, config) for row in chosen.rows for refusal in row.refusals)
    found = [*(check(chosen) for check in CHECKS), *own]
    return [*out_of_bounds(config), *(message for message in found if message is not None)]


def said_by(row: Option, refusal: Callable[[RunConfig], str | None], config: RunConfig) -> str | None:
    """Return what a refusal of an option says. UserError if this is neither None nor a filled text, as an extension
    may return."""
    said: object = refusal(config)
    if said is None or (isinstance(said, str) and said.strip()):
        return said
    typed = f"{KNOBS[type(row)]}={row.name}"
    raise UserError(f"{typed}: a refusal of its row returned {said!r}; return None, or a line with knob and remedy")


def run_name(chosen: Chosen) -> str | None:
    """The name of a run can be the beginning of a folder's name."""
    return refuse_name(chosen.config.name)


def sampling_range(chosen: Chosen) -> str | None:
    """Temperature, top_k and top_p are in ranges with which a token can be drawn."""
    sampling = chosen.config.sampling
    if sampling.temperature < 0:
        return f"sampling.temperature={sampling.temperature} is negative; use sampling.temperature=0 (greedy)"
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        return (
            f"sampling.temperature={sampling.temperature} is below {LEAST_TEMPERATURE}, where only the likeliest token "
            "remains; use sampling.temperature=0 (greedy)"
        )
    if sampling.top_k is not None and sampling.top_k < 1:
        return f"sampling.top_k={sampling.top_k} leaves no token; use sampling.top_k=null for all of them"
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        return f"sampling.top_p={sampling.top_p} is not a probability above 0; use sampling.top_p=null for all tokens"
    if sampling.top_p is not None and sampling.top_p < LEAST_TOP_P:
        return (
            f"sampling.top_p={sampling.top_p} is below {LEAST_TOP_P}, where only the likeliest token remains; use "
            "sampling.temperature=0 (greedy) with sampling.top_p=null"
        )
    return None


def truncation_needs_sampling(chosen: Chosen) -> str | None:
    """top_k and top_p are not set for greedy decoding, which reads neither."""
    config = chosen.config
    if config.sampling.temperature > 0:
        return None
    for knob, value in (("top_k", config.sampling.top_k), ("top_p", config.sampling.top_p)):
        if value is not None:
            return (
                f"sampling.{knob}={value} changes nothing at sampling.temperature={config.sampling.temperature}; "
                f"leave out sampling.{knob}"
            )
    return None


def threads_have_cores(chosen: Chosen) -> str | None:
    """There are not far more threads than cores. With a hundred thousand, libraries crash without a message."""
    config = chosen.config
    most = MOST_THREADS_A_CORE * (os.cpu_count() or 1)
    if config.num_threads is None or config.num_threads <= most:
        return None
    return f"num_threads={config.num_threads} is more than the {most} that are useful here; use num_threads=null"


def cache_holds_a_request(chosen: Chosen) -> str | None:
    """The cache holds the shortest request there can be: the workload's prompt, or one token, with output and
    drafts."""
    config = chosen.config
    cache = config.cache
    prompt_tokens = config.workload.prompt_tokens or 1
    needed = prompt_tokens + config.max_new_tokens
    if cache.max_seq_len is not None and cache.max_seq_len < needed:
        return (
            f"cache.max_seq_len={cache.max_seq_len} is under the {needed} tokens of a prompt of {prompt_tokens} and "
            f"max_new_tokens={config.max_new_tokens}; lower max_new_tokens, or use cache.max_seq_len=null if the "
            "target has more positions"
        )
    needed_in_pages = needed + 2 * config.drafter.num_draft_tokens
    num_usable = (cache.num_pages or 0) - NUM_RESERVED_PAGES
    if cache.num_pages is not None and cache.page_size > 0 and num_usable * cache.page_size < needed_in_pages:
        return (
            f"cache.num_pages={cache.num_pages} of {cache.page_size} tokens, {NUM_RESERVED_PAGES} of them reserved, do "
            f"not hold {needed} tokens of a request and {needed_in_pages - needed} of drafts; use cache.num_pages=null"
        )
    return None


def prompts_fit_a_forward(chosen: Chosen) -> str | None:
    """A forward that may hold several prompts has room for the longest chunk of one."""
    chunk, tokens = chosen.config.cache.prefill_chunk, chosen.config.cache.prefill_tokens
    if chunk is None or tokens is None or tokens <= 1 or chunk <= tokens:
        return None
    return (
        f"cache.prefill_tokens={tokens} is under the {chunk} rows that cache.prefill_chunk={chunk} lets one prompt "
        f"have; use cache.prefill_chunk={tokens}, or cache.prefill_tokens=1 for one prompt a forward"
    )


def device_and_dtype(chosen: Chosen) -> str | None:
    """The device is known, and float16 is not set together with device=cpu."""
    config = chosen.config
    base, _, index = config.device.partition(":")
    if base not in DEVICES or (index and not (base == "cuda" and index.isdecimal())):
        return f"device={config.device} is unknown; use auto, cpu, cuda or cuda:1"
    if config.dtype == Dtype.float16 and config.device == "cpu":
        return "dtype=float16 is for a GPU; use dtype=float32 with device=cpu"
    return None


def workload_knobs(chosen: Chosen) -> str | None:
    """The keys that the workload requires are set, and those that only other workloads read are not."""
    workload, reads = chosen.config.workload, chosen.workload.reads
    others = chosen.registry.options(WorkloadOption)
    for knob, value in reads.items():
        if getattr(workload, knob) is None:
            return f"workload={workload.name} needs workload.{knob}; add workload.{knob}={value}"
    for knob in dict.fromkeys(knob for option in others.values() for knob in option.reads):
        if knob not in reads and getattr(workload, knob) is not None:
            reader = next(name for name, option in others.items() if knob in option.reads)
            return (
                f"workload.{knob}={getattr(workload, knob)} is not read by workload={workload.name}; "
                f"leave it out or choose workload={reader}"
            )
    return None


def recorded_rows(chosen: Chosen) -> str | None:
    """At most `MAX_RECORDED_TOPK` tokens of a verify row are recorded."""
    topk = chosen.config.record.topk
    if topk <= MAX_RECORDED_TOPK:
        return None
    return f"record.topk={topk} is above {MAX_RECORDED_TOPK}, the largest value; use record.topk=16"


def workload_categories(chosen: Chosen) -> str | None:
    """If categories are given there is at least one, each is named once, and the workload has categories."""
    workload = chosen.config.workload
    if workload.categories is None:
        return None
    if not workload.categories:
        return "workload.categories=[] leaves no prompt; use workload.categories=null for all of them"
    repeated = [name for name, count in Counter(workload.categories).items() if count > 1]
    if repeated:
        return f"workload.categories names {', '.join(repeated)} more than once; name each category once"
    if not chosen.workload.has_categories:
        return f"workload.categories is not read by workload={workload.name}; leave it out"
    return None


def output_keeps_the_law(chosen: Chosen) -> str | None:
    """With acceptance.lossless_only, the rule must not change the distribution of outputs."""
    acceptance = chosen.config.acceptance
    if not acceptance.lossless_only or chosen.rule.keeps_the_law(acceptance):
        return None
    return (
        f"acceptance={acceptance.name} may change the output, which acceptance.lossless_only=true refuses; use "
        f"{lossless_rule(chosen.config)}, or acceptance.lossless_only=false"
    )


CHECKS: tuple[Check, ...] = (
    run_name,
    output_keeps_the_law,
    *DRAFTER_CHECKS,
    *GRAPH_CHECKS,
    *KERNEL_CHECKS,
    *TREE_CHECKS,
    *OFFER_CHECKS,
    *WEIGHT_CHECKS,
    *RANK_CHECKS,
    sampling_range,
    truncation_needs_sampling,
    threads_have_cores,
    cache_holds_a_request,
    prompts_fit_a_forward,
    device_and_dtype,
    workload_knobs,
    workload_categories,
    recorded_rows,
)


def refuse_name(name: str) -> str | None:
    """Return why `name=...` is refused, in a line; None if it is accepted."""
    if not name or "/" in name:
        return f"name={name!r} is part of a folder's name; use a plain word such as name=run"
    return None
