"""The workloads. Each option of the group has a function that makes its requests from the configuration."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.core.text_stops import TextStops
from spec_lab.core.types import Request
from spec_lab.menu.config import RunConfig, WorkloadConfig
from spec_lab.workloads.prompt_files import Prompt, read_jsonl, read_spec_bench, shipped_prompts
from spec_lab.workloads.reasoning_gym import made_prompts
from spec_lab.workloads.tokenizer import Tokenizer
from spec_lab.workloads.unusable import keep_usable


def pocket_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the shipped evaluation prompts."""
    return _in_turn(shipped_prompts(), config, tokenizer)


def jsonl_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the user's prompts (`read_jsonl`)."""
    return _in_turn(read_jsonl(config.workload), config, tokenizer)


def spec_bench_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the questions of Spec-Bench and MT-bench (`read_spec_bench`)."""
    return _in_turn(read_spec_bench(config.workload), config, tokenizer)


def reasoning_gym_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Make workload.per_category prompts of each of workload.tasks with reasoning_gym and the run's seed."""
    workload = config.workload
    assert workload.tasks and workload.per_category, "set by the workload's YAML, and at least 1"
    return _in_turn(made_prompts(workload.tasks, workload.per_category, config.seed), config, tokenizer)


def _in_turn(prompts: list[Prompt], config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    def request(prompt: Prompt) -> Request:
        own = config.workload.system if prompt.system is None else prompt.system
        system = own if prompt.form == "chat" else None
        prompt_ids = tokenizer.encode_prompt(prompt.form, prompt.text, system)
        return Request(
            request_id=prompt.prompt_id,
            category=prompt.category,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=prompt.max_new_tokens or config.max_new_tokens,
            answer=prompt.answer,
            checker=prompt.checker,
            ignore_eos=config.workload.ignore_eos,
            turns=(prompt.text, *prompt.later_turns) if prompt.later_turns else (),
            system=system,
            num_draft_tokens=prompt.num_draft_tokens,
            **_ends(config.workload, tokenizer, prompt.stop, prompt.stop_token_ids),
        )

    chosen = select_prompts(prompts, config.workload.categories, config.workload.limit)
    return keep_usable(chosen, request, config.workload.unusable)


def _ends(
    workload: WorkloadConfig,
    tokenizer: Tokenizer,
    stop: Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return what else ends a request: its own stops if it has any, else the run's."""
    texts = workload.stop if stop is None else stop
    token_ids = workload.stop_token_ids if stop_token_ids is None else stop_token_ids
    for text in texts or ():
        if not tokenizer.encode(text):  # a target without a tokenizer refuses any text
            raise UserError(f"workload.stop: {text!r} has no token, so it would end every output at once; leave it out")
    stops = TextStops(tuple(texts), tokenizer.decode) if texts else None
    return {"stops": stops, "stop_token_ids": frozenset(token_ids or ())}


def select_prompts(prompts: list[Prompt], categories: list[str] | None, limit: int | None) -> list[Prompt]:
    """Choose up to `limit` prompts of `categories`. They are taken from the categories in turn, so that a limit of as
    many prompts as categories includes every category."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    chosen = [dict(by_category)[name] for name in (categories or sorted(by_category))]
    in_turn = [prompt for prompt in chain.from_iterable(zip_longest(*chosen)) if prompt is not None]
    return in_turn[:limit]


def fixed_length_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Make prompts of exactly workload.prompt_tokens tokens from the shipped natural text, which repeats if it is too
    short."""
    text = "\n\n".join(prompt.text for prompt in shipped_prompts() if prompt.form == "continue")
    ids = tokenizer.encode(text)
    num_requests, length = _sizes(config.workload)
    windows = (ids[i * length : (i + 1) * length] for i in range(num_requests))
    repeated = (window if len(window) == length else (ids * (length // len(ids) + 1))[:length] for window in windows)
    return _id_requests(repeated, config, tokenizer)


def random_id_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Draw uniform token ids. They are for measuring kernels only, since they overstate the throughput of real text
    (SPEED-Bench, arXiv 2604.09557)."""
    num_requests, length = _sizes(config.workload)
    generator = random.Random(config.seed)
    prompts = ([generator.randrange(tokenizer.vocab_size) for _ in range(length)] for _ in range(num_requests))
    return _id_requests(prompts, config, tokenizer)


def _id_requests(prompts: Iterable[list[int]], config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    name, limit, ignores = config.workload.name, config.workload.limit, config.workload.ignore_eos
    ends = _ends(config.workload, tokenizer)
    return [
        Request(f"{name}-{number:04d}", name, tuple(ids), config.max_new_tokens, ignore_eos=ignores, **ends)
        for number, ids in enumerate(islice(prompts, limit))
    ]


def _sizes(config: WorkloadConfig) -> tuple[int, int]:
    assert config.num_requests and config.prompt_tokens, "set by the workload's YAML, and at least 1"
    return config.num_requests, config.prompt_tokens
