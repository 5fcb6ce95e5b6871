"""Opens the workload of a run: the tokenizer of its target, and its requests, checked against the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import has_tokenizer
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.menu.choices import ByRequest, Unusable, Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig, RunConfig, WorkloadConfig
from spec_lab.menu.option import CheckerOption
from spec_lab.workloads.conversations import require_room
from spec_lab.workloads.tokenizer import IdsAlone, TargetTokenizer, Tokenizer
from spec_lab.workloads.unusable import keep_usable

ALL = "all"
"""What reports call all categories together."""


def open_workload(chosen: Chosen) -> tuple[Tokenizer, list[Request]]:
    """Return the tokenizer of the target, and the requests of the workload, which its embedding has rows for.

    config.json is read first: of a checkpoint that is none of ours, no other file is.

    Raises:
        UserError: the checkpoint, its tokenizer or the workload is not what it should be.
    """
    config, folder = chosen.config, chosen.target_folder
    target = read_model_config(folder)
    _refuse_too_long(config, target)
    tokenizer = _tokenizer(chosen, folder, target.vocab_size)
    requests = load_requests(chosen, tokenizer)
    if config.workload.unusable == Unusable.skip:
        requests = _fitting(requests, longest_sequence(chosen), config)
    check_requests(requests, target, folder)
    if chosen.drafter.drafts:
        _check_drafts(requests, config.drafter)
    return tokenizer, requests


def longest_sequence(chosen: Chosen) -> int:
    """Count the tokens of prompt and output that the target and the cache take at most."""
    num_positions = read_model_config(chosen.target_folder).max_position_embeddings
    return min(chosen.config.cache.max_seq_len or num_positions, num_positions)


def _tokenizer(chosen: Chosen, folder: Path, vocab_size: int) -> Tokenizer:
    """Return the target's tokenizer; without one, ids stand for themselves where no prompt is text, or no weight means
    anything."""
    needs_none = chosen.config.target.weights == Weights.random or not chosen.workload.reads_text
    has_one = has_tokenizer(folder) if is_gguf(folder) else (folder / "tokenizer.json").is_file()
    if needs_none and not has_one:
        return IdsAlone(vocab_size)
    return TargetTokenizer(folder)


def load_requests(chosen: Chosen, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of the workload; UserError when none is left or a file is not what it should be."""
    requests = list(chosen.workload.load(chosen.config, tokenizer) or ())
    for number, request in enumerate(requests):
        if problem := _malformed(request):
            raise UserError(f"workload={chosen.workload.name}: request {number} {problem}; mend what its row loads")
    if not requests:
        raise UserError(
            f"workload={chosen.workload.name} is empty; check workload.limit, workload.categories and workload.path"
        )
    _refuse_idle_checkers(requests, chosen.config.workload)
    for request in requests:
        name = request.checker or chosen.config.workload.checker
        checker = chosen.registry.find(CheckerOption, name)
        if request.answer is not None and not checker.expects(request.answer):
            raise UserError(
                f"workload: the answer {request.answer!r} of prompt {request.request_id} is none that workload.checker="
                f"{name} reads; mend it, or choose another checker"
            )
    return requests


def _refuse_idle_checkers(requests: Sequence[Request], workload: WorkloadConfig) -> None:
    """Raise UserError for a checker that was named and has no answer to check."""
    unanswered = [request for request in requests if request.answer is None]
    if named := [request for request in unanswered if request.checker is not None]:
        raise UserError(
            f"workload: prompt {named[0].request_id} has checker {named[0].checker} and no answer to check; give it an "
            "answer, or leave the checker out"
        )
    if workload.checker != WorkloadConfig.checker and len(unanswered) == len(requests):
        raise UserError(f"workload.checker={workload.checker}: no prompt has an answer to check; leave it out")


def _malformed(request: object) -> str | None:
    """Say what of a request is of another type than it should be: a workload may be somebody else's code."""
    if not isinstance(request, Request):
        return f"is {request!r}, no Request"
    held: dict[str, Any] = dataclasses.asdict(request)
    for name in ("request_id", "category", "answer", "system", "checker"):
        is_name = name in ("request_id", "category")
        if not isinstance(held[name], str if is_name else str | None) or (is_name and not held[name].strip()):
            return f"has {name}={held[name]!r}, which is no text that says something"
    for name, values in {"prompt_ids": held["prompt_ids"], "max_new_tokens": [held["max_new_tokens"]]}.items():
        if wrong := [value for value in values if type(value) is not int or value < 0]:
            return f"has {wrong[0]!r} in {name}, which is no whole number from 0 on"
    return None


def _fitting(requests: list[Request], max_seq_len: int, config: RunConfig) -> list[Request]:
    """Return the requests that the target can take; UserError when there is none."""

    def check(request: Request) -> Request:
        require_room(request, max_seq_len)
        return request

    kept = keep_usable(requests, check, config.workload.unusable)
    if not kept:
        raise UserError(f"workload={config.workload.name}: no prompt is short enough; lower max_new_tokens")
    return kept


def _refuse_too_long(config: RunConfig, target: ModelConfig) -> None:
    """Refuse before anything of that length is made."""
    prompt_tokens = config.workload.prompt_tokens
    if prompt_tokens is not None and prompt_tokens + config.max_new_tokens > target.max_position_embeddings:
        raise UserError(
            f"workload.prompt_tokens={prompt_tokens} and max_new_tokens={config.max_new_tokens} are more than the "
            f"target's {target.max_position_embeddings} positions; lower one of them"
        )


def check_requests(requests: list[Request], target: ModelConfig, folder: Path) -> None:
    """Raise UserError for a prompt with a token that the target has no embedding of, for two requests of one id, and
    for names that a terminal would obey or that a report gives to all of them."""
    _refuse_duplicates(requests)
    for request in requests:
        if not (request.request_id + request.category).isprintable():
            raise UserError(
                f"workload: id and category of the prompt {request.request_id!r} ({request.category!r}) must be "
                "printable; take out their control codes"
            )
        if request.category == ALL:
            raise UserError(
                f"workload: the category of the prompt {request.request_id!r} is {ALL!r}, which reports call all "
                "categories together; give it another name"
            )
        if request.prompt_ids and max(request.prompt_ids) >= target.vocab_size:
            raise UserError(
                f"{folder / 'tokenizer.json'}: token id {max(request.prompt_ids)} of prompt {request.request_id} is "
                f"past the target's vocabulary of {target.vocab_size}; take tokenizer and weights from one checkpoint"
            )


def _check_drafts(requests: list[Request], drafter: DrafterConfig) -> None:
    """Raise UserError for a request with a K of its own that nothing reads, or that the run has no room for."""
    for request in requests:
        k = request.num_draft_tokens
        if k is None:
            continue
        if drafter.by_request == ByRequest.same:
            raise UserError(
                f"prompt {request.request_id} has `num_draft_tokens`, which drafter.by_request=same does not read; use "
                "drafter.by_request=given"
            )
        if k > drafter.num_draft_tokens:
            raise UserError(
                f"prompt {request.request_id} asks for {k} drafts; use drafter.num_draft_tokens={k}, the most of all, "
                "or lower its `num_draft_tokens`"
            )


def _refuse_duplicates(requests: list[Request]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise UserError(f"workload: two prompts have the id {request.request_id}; ids must differ")
        seen.add(request.request_id)
