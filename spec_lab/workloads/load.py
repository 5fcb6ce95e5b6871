"""Makes requests of prompts, and prompts of one length."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError
from spec_lab.core.text_stops import TextStops
from spec_lab.core.types import Request
from spec_lab.workloads.prompt_files import Prompt, shipped_prompts
from spec_lab.workloads.tokenizer import Tokenizer
from spec_lab.workloads.unusable import keep_usable

if TYPE_CHECKING:
    from spec_lab.config.groups import WorkloadConfig
    from spec_lab.config.run import Run
    from spec_lab.options.workloads import FixedLength


def in_turn(prompts: list[Prompt], run: Run, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of the prompts that `run.workload` chooses."""

    def request(prompt: Prompt) -> Request:
        own = run.workload.system if prompt.system is None else prompt.system
        system = own if prompt.form == "chat" else None
        prompt_ids = tokenizer.encode_prompt(prompt.form, prompt.text, system)
        return Request(
            request_id=prompt.prompt_id,
            category=prompt.category,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=prompt.max_new_tokens or run.max_new_tokens,
            answer=prompt.answer,
            checker=prompt.checker,
            ignore_eos=run.workload.ignore_eos,
            turns=(prompt.text, *prompt.later_turns) if prompt.later_turns else (),
            system=system,
            num_draft_tokens=prompt.num_draft_tokens,
            **_ends(run.workload, tokenizer, prompt.stop, prompt.stop_token_ids),
        )

    chosen = select_prompts(prompts, run.workload.categories, run.workload.limit)
    return keep_usable(chosen, request, run.workload.unusable)


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


def fixed_length_requests(workload: FixedLength, run: Run, tokenizer: Tokenizer) -> list[Request]:
    """Make prompts of exactly workload.prompt_tokens tokens from the shipped natural text, which repeats if it is too
    short."""
    text = "\n\n".join(prompt.text for prompt in shipped_prompts() if prompt.form == "continue")
    ids = tokenizer.encode(text)
    num_requests, length = workload.num_requests, workload.prompt_tokens
    windows = (ids[i * length : (i + 1) * length] for i in range(num_requests))
    repeated = (window if len(window) == length else (ids * (length // len(ids) + 1))[:length] for window in windows)
    return _id_requests(repeated, run, tokenizer)


def random_id_requests(workload: FixedLength, run: Run, tokenizer: Tokenizer) -> list[Request]:
    """Draw uniform token ids. They are for measuring kernels only, since they overstate the throughput of real text
    (SPEED-Bench, arXiv 2604.09557)."""
    num_requests, length = workload.num_requests, workload.prompt_tokens
    generator = random.Random(run.seed)
    prompts = ([generator.randrange(tokenizer.vocab_size) for _ in range(length)] for _ in range(num_requests))
    return _id_requests(prompts, run, tokenizer)


def _id_requests(prompts: Iterable[list[int]], run: Run, tokenizer: Tokenizer) -> list[Request]:
    name, limit, ignores = run.workload.name, run.workload.limit, run.workload.ignore_eos
    ends = _ends(run.workload, tokenizer)
    return [
        Request(f"{name}-{number:04d}", name, tuple(ids), run.max_new_tokens, ignore_eos=ignores, **ends)
        for number, ids in enumerate(islice(prompts, limit))
    ]
