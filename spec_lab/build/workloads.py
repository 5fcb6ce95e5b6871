"""Opens the workload of a run: its target's tokenizer, and its requests, which are checked against the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from spec_lab.build.limits import longest_sequence
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import has_tokenizer
from spec_lab.config.choices import Unusable, Weights
from spec_lab.config.option import get
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.workloads.conversations import require_room
from spec_lab.workloads.tokenizer import IdsAlone, TargetTokenizer, Tokenizer
from spec_lab.workloads.unusable import keep_usable


def open_workload(run: Run) -> tuple[Tokenizer, list[Request]]:
    """Return the target's tokenizer and the workload's requests. All prompt tokens are in the target's vocabulary.

    The target's config is read first. If the checkpoint is not supported, nothing else is read.

    Raises:
        UserError: the checkpoint, its tokenizer or the workload is invalid.
    """
    folder = run.target.folder
    target = read_model_config(folder)
    tokenizer = _tokenizer(run, folder, target.vocab_size)
    requests = list(run.workload.load(run, tokenizer))
    if run.workload.by_category:
        requests.sort(key=lambda request: request.category)
    if run.workload.unusable == Unusable.skip:
        requests = keep_usable(requests, partial(require_room, most=longest_sequence(run)), Unusable.skip)
    check_requests(run, requests, target)
    return tokenizer, requests


def _tokenizer(run: Run, folder: Path, vocab_size: int) -> Tokenizer:
    """Return the target's tokenizer. Without one, prompts can only be ids, which is accepted if the workload has no
    text, or if weights are random."""
    needs_none = run.target.weights == Weights.random or not run.workload.reads_text
    has_one = has_tokenizer(folder) if is_gguf(folder) else (folder / "tokenizer.json").is_file()
    return IdsAlone(vocab_size) if needs_none and not has_one else TargetTokenizer(folder, run.workload.thinking)


def check_requests(run: Run, requests: Sequence[Request], target: ModelConfig) -> None:
    """Raise UserError for an id that two requests have, an answer that its checker never reads, a token that is not in
    the target's vocabulary, a K that is above the run's, or no request at all."""
    if not requests:
        raise UserError(f"workload={run.workload.name} is empty; check workload.limit and workload.categories")
    name, count = Counter(request.request_id for request in requests).most_common(1)[0]
    if count > 1:
        raise UserError(f"workload: {count} prompts have the id {name}; ids must differ")
    for request in requests:
        checker = request.checker or run.workload.checker
        if request.answer is not None and not get("workload.checker", checker).expects(request.answer):
            raise UserError(
                f"workload: the answer {request.answer!r} of prompt {request.request_id} is not one that "
                f"workload.checker={checker} reads; choose another checker"
            )
        if request.prompt_ids and max(request.prompt_ids) >= target.vocab_size:
            raise UserError(
                f"workload: token {max(request.prompt_ids)} of prompt {request.request_id} is outside the target's "
                f"vocabulary of {target.vocab_size}; take tokenizer and weights from one checkpoint"
            )
        k, most = request.num_draft_tokens, run.drafter.num_draft_tokens
        if k is not None and run.drafter.drafts and (k > most or run.drafter.plan == "none"):
            raise UserError(
                f"workload: prompt {request.request_id} asks for {k} drafts; use drafter.plan=given and "
                f"drafter.num_draft_tokens={max(k, most)}"
            )
