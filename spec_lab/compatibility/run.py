"""What cannot work, found before anything is loaded.

Each check looks at a composed `RunConfig` and returns None, or one line that names the knob and the remedy. A pair that
is pointless but harmless passes: `prune=catchup` with a drafter that has no catch-up step is a logged no-op, so that
sweeps compose. What only a loaded model can tell (shapes, tokenizers, prompt lengths) is refused by its loader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from spec_lab.compatibility.drafters import DRAFTER_CHECKS, missing_folder
from spec_lab.compatibility.graphs import GRAPH_CHECKS
from spec_lab.compatibility.kernels import KERNEL_CHECKS
from spec_lab.compatibility.rules import RULE_CHECKS
from spec_lab.config import RunConfig
from spec_lab.errors import UserError, not_among

NUM_RESERVED_PAGES = 2  # of core.kv_cache, which imports torch; a test holds the two together
MAX_RECORDED_TOPK = 128
PREFILL_PRUNING = ("all_rows", "last_row")
CATCHUP_PRUNING = ("none", "post_attention", "pre_attention")
REFERENCES = ("plain", "unpruned")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOGGER_MODES = ("auto", "online", "offline", "disabled")
WORKLOADS_FROM_A_FILE = ("jsonl", "spec_bench")
WORKLOADS_OF_ONE_LENGTH = ("fixed_length", "random_ids")

Check = Callable[[RunConfig], str | None]


def refuse(config: RunConfig) -> None:
    """Raise UserError with the first refusal, if there is one."""
    found = refusals(config)
    if found:
        more = f" (and {len(found) - 1} more: see --dry-run)" if len(found) > 1 else ""
        raise UserError(found[0] + more)


def refusals(config: RunConfig) -> list[str]:
    """Everything that speaks against the run, a line each; empty when it may start."""
    return [message for check in CHECKS if (message := check(config)) is not None]


def run_name(config: RunConfig) -> str | None:
    if config.name and config.name == Path(config.name).name and not config.name.startswith("."):
        return None
    return f"name={config.name!r} is part of a folder's name; use a plain word such as name=run"


def target_path(config: RunConfig) -> str | None:
    path = config.target.path
    if config.target.name == "hf":
        if path is None:
            return "target=hf needs a checkpoint; add target.path=FOLDER"
        return missing_folder("target.path", path)
    if path is not None:
        return f"target.path={path} is not read by target={config.target.name}; add target=hf"
    return None


def sampling_range(config: RunConfig) -> str | None:
    sampling = config.sampling
    if sampling.temperature < 0:
        return f"sampling.temperature={sampling.temperature} is negative; use sampling.temperature=0 (greedy)"
    if sampling.top_k is not None and sampling.top_k < 1:
        return f"sampling.top_k={sampling.top_k} leaves no token; use sampling.top_k=null for all of them"
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        return f"sampling.top_p={sampling.top_p} is no probability above 0; use sampling.top_p=null for all tokens"
    return None


def truncation_needs_sampling(config: RunConfig) -> str | None:
    if config.sampling.temperature > 0:
        return None
    for knob, value in (("top_k", config.sampling.top_k), ("top_p", config.sampling.top_p)):
        if value is not None:
            return (
                f"sampling.{knob}={value} changes nothing at sampling.temperature={config.sampling.temperature}; "
                f"leave out sampling.{knob}"
            )
    return None


def prune_knobs(config: RunConfig) -> str | None:
    return not_among("prune.prefill", config.prune.prefill, PREFILL_PRUNING) or not_among(
        "prune.catchup", config.prune.catchup, CATCHUP_PRUNING
    )


def references_exist(config: RunConfig) -> str | None:
    for reference in config.references:
        if reference not in REFERENCES:
            return f"references has no {reference}; use references=[{','.join(REFERENCES)}], one of them, or []"
    return None


def sizes(config: RunConfig) -> str | None:
    """Counts that have a least value, and the value to use instead of a smaller one."""
    least: tuple[tuple[str, int | None, int, str], ...] = (
        ("batch_size", config.batch_size, 1, "1"),
        ("max_new_tokens", config.max_new_tokens, 1, "160"),
        ("repeats", config.repeats, 1, "3"),
        ("warmup_requests", config.warmup_requests, 0, "0"),
        ("profile_rounds", config.profile_rounds, 0, "0"),
        ("num_threads", config.num_threads, 1, "null"),
        ("cache.page_size", config.cache.page_size, 1, "16"),
        ("cache.prefill_chunk", config.cache.prefill_chunk, 1, "512"),
        ("cache.num_pages", config.cache.num_pages, 1, "null"),
        ("workload.limit", config.workload.limit, 1, "null"),
        ("workload.prompt_tokens", config.workload.prompt_tokens, 1, "64"),
        ("workload.num_requests", config.workload.num_requests, 1, "8"),
        ("workload.per_category", config.workload.per_category, 1, "20"),
        ("record.topk", config.record.topk, 0, "0"),
    )
    for knob, value, minimum, remedy in least:
        if value is not None and value < minimum:
            return f"{knob}={value} is too small, at least {minimum} is needed; use {knob}={remedy}"
    return None


def cache_holds_a_request(config: RunConfig) -> str | None:
    """The shortest request there can be: the workload's prompt, or one token, and the output."""
    cache = config.cache
    prompt_tokens = config.workload.prompt_tokens or 1
    needed = prompt_tokens + config.max_new_tokens
    if cache.max_seq_len is not None and cache.max_seq_len < needed:
        return (
            f"cache.max_seq_len={cache.max_seq_len} is under the {needed} tokens of a prompt of {prompt_tokens} and "
            f"max_new_tokens={config.max_new_tokens}; use cache.max_seq_len=null or lower max_new_tokens"
        )
    needed_in_pages = needed + 2 * config.drafter.num_draft_tokens
    num_usable = (cache.num_pages or 0) - NUM_RESERVED_PAGES
    if cache.num_pages is not None and cache.page_size > 0 and num_usable * cache.page_size < needed_in_pages:
        return (
            f"cache.num_pages={cache.num_pages} of {cache.page_size} tokens do not hold a request of {needed} tokens; "
            "use cache.num_pages=null"
        )
    return None


def device_and_dtype(config: RunConfig) -> str | None:
    base, _, index = config.device.partition(":")
    if base not in DEVICES or (index and not (base == "cuda" and index.isdecimal())):
        return f"device={config.device} is unknown; use auto, cpu, cuda or cuda:1"
    if config.dtype == "float16" and config.device == "cpu":
        return "dtype=float16 is for a GPU; use dtype=float32 with device=cpu"
    return not_among("dtype", config.dtype, DTYPES)


def workload_source(config: RunConfig) -> str | None:
    workload = config.workload
    if workload.name in WORKLOADS_FROM_A_FILE:
        if workload.path is None:
            return f"workload={workload.name} needs a file of prompts; add workload.path=FILE"
        if not Path(workload.path).is_file():
            return f"workload.path={workload.path} is no file; give the path of a JSON Lines file"
    elif workload.path is not None:
        return f"workload.path={workload.path} is not read by workload={workload.name}; add workload=jsonl"
    return None


def workload_lengths(config: RunConfig) -> str | None:
    workload = config.workload
    for knob, value in (("prompt_tokens", workload.prompt_tokens), ("num_requests", workload.num_requests)):
        if workload.name in WORKLOADS_OF_ONE_LENGTH and value is None:
            return f"workload={workload.name} needs workload.{knob}; add workload.{knob}=8"
        if workload.name not in WORKLOADS_OF_ONE_LENGTH and value is not None:
            return (
                f"workload.{knob}={value} is not read by workload={workload.name}; "
                f"leave it out or choose workload={WORKLOADS_OF_ONE_LENGTH[0]}"
            )
    return None


def workload_per_category(config: RunConfig) -> str | None:
    workload = config.workload
    if (workload.name == "generated") == (workload.per_category is not None):
        return None
    if workload.per_category is None:
        return "workload=generated needs workload.per_category; add workload.per_category=20"
    return (
        f"workload.per_category={workload.per_category} is not read by workload={workload.name}; "
        "leave it out or choose workload=generated"
    )


def recorded_rows(config: RunConfig) -> str | None:
    topk = config.record.topk
    if topk <= MAX_RECORDED_TOPK:
        return None
    return f"record.topk={topk} is above {MAX_RECORDED_TOPK}, more than a rule looks at; use record.topk=16"


def workload_categories(config: RunConfig) -> str | None:
    workload = config.workload
    if workload.categories is None:
        return None
    if not workload.categories:
        return "workload.categories=[] leaves no prompt; use workload.categories=null for all of them"
    repeated = [name for name, count in Counter(workload.categories).items() if count > 1]
    if repeated:
        return f"workload.categories names {', '.join(repeated)} more than once; name each category once"
    if workload.name in WORKLOADS_OF_ONE_LENGTH:
        return f"workload.categories is not read by workload={workload.name}; leave it out"
    return None


def logger_mode(config: RunConfig) -> str | None:
    return not_among("logger.mode", config.logger.mode, LOGGER_MODES)


CHECKS: tuple[Check, ...] = (
    run_name,
    target_path,
    *DRAFTER_CHECKS,
    *RULE_CHECKS,
    *GRAPH_CHECKS,
    *KERNEL_CHECKS,
    sampling_range,
    truncation_needs_sampling,
    prune_knobs,
    references_exist,
    sizes,
    cache_holds_a_request,
    device_and_dtype,
    workload_source,
    workload_lengths,
    workload_per_category,
    workload_categories,
    recorded_rows,
    logger_mode,
)
