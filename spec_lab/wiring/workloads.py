"""Opens the workload of a run: its target's tokenizer, and its requests, which are checked against the target."""

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
"""The name of all categories together in reports."""


def open_workload(chosen: Chosen) -> tuple[Tokenizer, list[Request]]:
    """Return the target's tokenizer and the workload's requests. All prompt tokens are in the target's vocabulary.

    The config is read first. If the checkpoint is not supported, nothing else is read.

    Raises:
        UserError: the checkpoint, its tokenizer or the workload is invalid.
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
    """Return the largest number of tokens, prompt and output, that the target and the cache support."""
    num_positions = read_model_config(chosen.target_folder).max_position_embeddings
    return min(chosen.config.cache.max_seq_len or num_positions, num_positions)


def _tokenizer(chosen: Chosen, folder: Path, vocab_size: int) -> Tokenizer:
    """Return the target's tokenizer. Without one, prompts can only be ids, which is accepted if the workload has no
    text, or if weights are random."""
    needs_none = chosen.config.target.weights == Weights.random or not chosen.workload.reads_text
    has_one = has_tokenizer(folder) if is_gguf(folder) else (folder / "tokenizer.json").is_file()
    if needs_none and not has_one:
        return IdsAlone(vocab_size)
    return TargetTokenizer(folder, chosen.config.workload.thinking)


def load_requests(chosen: Chosen, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of the workload; UserError if there is none, or one cannot be used."""
    requests = list(chosen.workload.load(chosen.config, tokenizer) or ())
    for number, request in enumerate(requests):
        if problem := _malformed(request):
            raise UserError(f"workload={chosen.workload.name}: request {number} {problem}; correct the row of its file")
    if not requests:
        workload = chosen.config.workload
        set_keys = [f"workload.{key}" for key in ("categories", "path") if getattr(workload, key) is not None]
        remedy = " and ".join(set_keys) or "what the `load` of its row returns"
        if workload.unusable == Unusable.skip:
            remedy = "workload.path, and mend what was left out"
        raise UserError(f"workload={chosen.workload.name} is empty; check {remedy}")
    _refuse_unasked(requests, chosen.config.workload)
    _refuse_idle_checkers(requests, chosen.config.workload)
    for request in requests:
        name = request.checker or chosen.config.workload.checker
        if request.checker is not None and name not in chosen.registry.options(CheckerOption):
            raise UserError(
                f"workload: prompt {request.request_id} has the checker {name}, which nothing builds; give it one of "
                f"{', '.join(chosen.registry.options(CheckerOption))}"
            )
        checker = chosen.registry.find(CheckerOption, name)
        if request.answer is not None and not checker.expects(request.answer):
            raise UserError(
                f"workload: the answer {request.answer!r} of prompt {request.request_id} is not one that "
                f"workload.checker={name} reads; correct it, or choose another checker"
            )
    return requests


def _refuse_idle_checkers(requests: Sequence[Request], workload: WorkloadConfig) -> None:
    """Raise UserError if a checker was named but there is no answer to check."""
    unanswered = [request for request in requests if request.answer is None]
    if named := [request for request in unanswered if request.checker is not None]:
        raise UserError(
            f"workload: prompt {named[0].request_id} has checker {named[0].checker} but no answer to check; give it an "
            "answer, or leave the checker out"
        )
    if workload.checker != WorkloadConfig.checker and len(unanswered) == len(requests):
        raise UserError(f"workload.checker={workload.checker}: no prompt has an answer to check; leave it out")


def _refuse_unasked(requests: Sequence[Request], workload: WorkloadConfig) -> None:
    """Raise UserError for requests past `limit` or of other `categories`, since a workload may be an extension's."""
    limit, categories = workload.limit, workload.categories
    if limit is not None and len(requests) > limit:
        raise UserError(
            f"workload.limit={limit}: workload={workload.name} loads {len(requests)} requests; mend what its row loads"
        )
    other = next((each for each in requests if each.category not in (categories or [each.category])), None)
    if categories is not None and other is not None:
        raise UserError(
            f"workload.categories=[{','.join(categories)}]: workload={workload.name} loads one of {other.category}; "
            "mend what its row loads, or set has_categories=False in the row"
        )


def _malformed(request: object) -> str | None:
    """Return what is wrong with the type or values of a request, which may be an extension's; None if nothing is."""
    if not isinstance(request, Request):
        return f"is {request!r}, no Request"
    held: dict[str, Any] = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    for name in ("request_id", "category", "answer", "system", "checker"):
        is_name = name in ("request_id", "category")
        if not isinstance(held[name], str if is_name else str | None) or (is_name and not held[name].strip()):
            return f"has {name}={held[name]!r}, which must be a text{' that is not empty' if is_name else ', or None'}"
    for name, values in {"prompt_ids": held["prompt_ids"], "max_new_tokens": [held["max_new_tokens"]]}.items():
        if wrong := [value for value in values if type(value) is not int or value < 0]:
            return f"has {wrong[0]!r} in {name}, which must be a whole number of 0 or more"
    return None


def _fitting(requests: list[Request], max_seq_len: int, config: RunConfig) -> list[Request]:
    """Return the requests that fit `max_seq_len`; UserError if there is none."""

    def check(request: Request) -> Request:
        require_room(request, max_seq_len)
        return request

    kept = keep_usable(requests, check, config.workload.unusable)
    if not kept:
        raise UserError(f"workload={config.workload.name}: no prompt is short enough; lower max_new_tokens")
    return kept


def _refuse_too_long(config: RunConfig, target: ModelConfig) -> None:
    """Refuse lengths that exceed the target's positions, before prompts of that length are made."""
    prompt_tokens = config.workload.prompt_tokens
    if prompt_tokens is not None and prompt_tokens + config.max_new_tokens > target.max_position_embeddings:
        raise UserError(
            f"workload.prompt_tokens={prompt_tokens} and max_new_tokens={config.max_new_tokens} are more than the "
            f"target's {target.max_position_embeddings} positions; lower one of them"
        )


def check_requests(requests: list[Request], target: ModelConfig, folder: Path) -> None:
    """Raise UserError for a token that is not in the target's vocabulary, two requests with the same id, a name with
    control codes, or the category that reports use for all categories."""
    _refuse_duplicates(requests)
    for request in requests:
        if not (request.request_id + request.category).isprintable():
            raise UserError(
                f"workload: id and category of the prompt {request.request_id!r} ({request.category!r}) must be "
                "printable; remove their control codes"
            )
        if request.category == ALL:
            raise UserError(
                f"workload: the category of the prompt {request.request_id!r} is {ALL!r}, which is the name of all "
                "categories in reports; give it another name"
            )
        if foreign := [token_id for token_id in request.stop_token_ids if not 0 <= token_id < target.vocab_size]:
            raise UserError(
                f"workload: prompt {request.request_id} stops at the token {foreign[0]}, but the target's vocabulary "
                f"has {target.vocab_size}; correct stop_token_ids"
            )
        if request.prompt_ids and max(request.prompt_ids) >= target.vocab_size:
            raise UserError(
                f"{folder / 'tokenizer.json'}: token id {max(request.prompt_ids)} of prompt {request.request_id} is "
                f"outside the target's vocabulary of {target.vocab_size}; take tokenizer and weights from one "
                "checkpoint, and make ids with that tokenizer in a workload of your own"
            )


def _check_drafts(requests: list[Request], drafter: DrafterConfig) -> None:
    """Raise UserError for a request's own K if nothing reads it, or if it exceeds the run's."""
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
                f"prompt {request.request_id} asks for {k} drafts; use drafter.num_draft_tokens={k}, the largest of "
                "all, or lower its `num_draft_tokens`"
            )


def _refuse_duplicates(requests: list[Request]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise UserError(f"workload: two prompts have the id {request.request_id}; ids must differ")
        seen.add(request.request_id)
