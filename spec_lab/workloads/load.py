"""The workloads. Each option of the group has a function that makes its requests from the configuration."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, islice, zip_longest
from pathlib import Path

from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.menu.config import RunConfig, WorkloadConfig
from spec_lab.workloads.own_turns import outputs_of
from spec_lab.workloads.prompt_files import Prompt, read_jsonl, read_spec_bench, shipped_prompts
from spec_lab.workloads.reasoning_gym import made_prompts
from spec_lab.workloads.tokenizer import Tokenizer
from spec_lab.workloads.unusable import UnusablePrompt, keep_usable


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
    if not workload.per_category or not workload.tasks:
        raise UserError(
            f"workload={workload.name} needs workload.tasks, such as '[chain_sum]', and workload.per_category of 1 or "
            "more"
        )
    return _in_turn(made_prompts(workload.tasks, workload.per_category, config.seed), config, tokenizer)


def _in_turn(prompts: list[Prompt], config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    def request(prompt: Prompt) -> Request:
        own = config.workload.system if prompt.system is None else prompt.system
        system = own if prompt.form == "chat" else None
        try:
            prompt_ids = tokenizer.encode_prompt(prompt.form, prompt.text, system)
        except UnusablePrompt as error:
            raise UnusablePrompt(f"{prompt.place or prompt.prompt_id}: {error}") from error
        return Request(
            request_id=prompt.prompt_id,
            category=prompt.category,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=config.max_new_tokens,
            answer=prompt.answer,
            checker=prompt.checker,
            ignore_eos=config.workload.ignore_eos,
            turns=(prompt.text, *prompt.later_turns) if prompt.later_turns else (),
            system=system,
            num_draft_tokens=prompt.num_draft_tokens,
        )

    chosen = select_prompts(prompts, config.workload.categories, config.workload.limit)
    if config.workload.system is not None and chosen and all(prompt.form != "chat" for prompt in chosen):
        raise UserError("workload.system is for chats, but no prompt is a chat; leave it out, or choose other prompts")
    return keep_usable(chosen, request, config.workload.unusable)


def select_prompts(prompts: list[Prompt], categories: list[str] | None, limit: int | None) -> list[Prompt]:
    """Choose up to `limit` prompts of `categories`. They are taken from the categories in turn, so that a limit of as
    many prompts as categories includes every category."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    unknown = sorted(set(categories or ()) - set(by_category))
    if unknown:
        raise UserError(
            f"workload.categories: no category {', '.join(unknown)}; there are {', '.join(sorted(by_category))}"
        )
    chosen = [by_category[name] for name in (categories or sorted(by_category))]
    in_turn = [prompt for prompt in chain.from_iterable(zip_longest(*chosen)) if prompt is not None]
    return in_turn[:limit]


def output_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the outputs of another run as prompts (`outputs_of`)."""
    if config.workload.path is None:
        raise UserError("workload=outputs asks what another run answered: set workload.path=FOLDER of the run")
    return _in_turn(outputs_of(Path(config.workload.path), tokenizer), config, tokenizer)


def fixed_length_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Make prompts of exactly workload.prompt_tokens tokens from the shipped natural text, which repeats if it is too
    short."""
    text = "\n\n".join(prompt.text for prompt in shipped_prompts() if prompt.form == "continue")
    ids = tokenizer.encode(text)
    num_requests, length = _sizes(config.workload)
    if not ids:
        raise UserError(f"workload={config.workload.name}: the target's tokenizer makes no token of the shipped text")
    windows = (ids[i * length : (i + 1) * length] for i in range(num_requests))
    repeated = (window if len(window) == length else (ids * (length // len(ids) + 1))[:length] for window in windows)
    return _id_requests(repeated, config)


def random_id_requests(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Draw uniform token ids. They are for measuring kernels only, since they overstate the throughput of real text
    (SPEED-Bench, arXiv 2604.09557)."""
    num_requests, length = _sizes(config.workload)
    generator = random.Random(config.seed)
    prompts = ([generator.randrange(tokenizer.vocab_size) for _ in range(length)] for _ in range(num_requests))
    return _id_requests(prompts, config)


def _id_requests(prompts: Iterable[list[int]], config: RunConfig) -> list[Request]:
    name, limit = config.workload.name, config.workload.limit
    return [
        Request(f"{name}-{number:04d}", name, tuple(ids), config.max_new_tokens, ignore_eos=config.workload.ignore_eos)
        for number, ids in enumerate(islice(prompts, limit))
    ]


def _sizes(config: WorkloadConfig) -> tuple[int, int]:
    if not config.num_requests or not config.prompt_tokens:
        raise UserError(f"workload={config.name} needs workload.num_requests and workload.prompt_tokens of 1 or more")
    return config.num_requests, config.prompt_tokens
