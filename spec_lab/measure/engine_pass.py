"""One timed pass of another engine, as the lab's records have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_lab.acceptance.noise import request_seed
from spec_lab.core.errors import Breakdown
from spec_lab.core.results import GenerationResult, GraphCounts, RequestRecord
from spec_lab.core.types import FinishReason, Request
from spec_lab.engines.process import EngineProcess
from spec_lab.record.draft_counts import RoundTotals
from spec_lab.workloads.tokenizer import Tokenizer

Answers = dict[str, dict[str, Any]]


@dataclasses.dataclass(slots=True)
class EnginePass:
    """One timed pass of an engine: what it gave, the answers as it told them, and its counts of the whole pass."""

    result: GenerationResult
    answers: Answers
    totals: RoundTotals | None
    told: dict[str, float | None]

    @property
    def tells_ids(self) -> bool:
        """Return whether the engine told token ids, and not texts alone."""
        return all(answer["tells_ids"] for answer in self.answers.values())


def timed_pass(
    engine: EngineProcess,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    num_draft_tokens: int,
    seed: int,
    end: Callable[[RequestRecord], None],
) -> EnginePass:
    """Have an engine decode the requests, and call `end` with each when it is complete. If it tells no token ids, they
    are those of the text, which may be others.

    Each request gets its own seed, from the run's `seed` and its id. vLLM's noise is a function of a request's seed and
    the position: with one seed for all of them, requests at the same position would share it.

    Raises:
        Breakdown: the engine failed, or did not answer all of them.
    """
    by_id, answers = {request.request_id: request for request in requests}, Answers()
    records: dict[str, RequestRecord] = {}

    def say(answer: dict[str, Any]) -> None:
        answer["tells_ids"] = answer["output_ids"] is not None
        if not answer["tells_ids"]:
            answer["output_ids"] = tokenizer.encode(answer["text"])
        answers[answer["id"]] = answer
        records[answer["id"]] = record_of(by_id[answer["id"]], answer)
        end(records[answer["id"]])

    asked = [
        {
            "id": request.request_id,
            "prompt_ids": list(request.prompt_ids),
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.ignore_eos,
            "seed": request_seed(seed, request.request_id) % 2**31,  # llama.cpp takes 32 bits, all ones for any seed
            "arrives_at": request.arrives_at,
        }
        for request in requests
    ]
    done = engine.generate(asked, say)
    if silent := [name for name in by_id if name not in records]:
        raise Breakdown(f"the engine did not answer {len(silent)} of {len(by_id)} requests, such as {silent[0]}")
    result = GenerationResult(
        requests=[records[name] for name in by_id],
        rounds=[],
        prefills=[],
        graph=GraphCounts(),
        num_draft_tokens=num_draft_tokens,
        seconds=done["seconds"],
    )
    counts = done.get("totals")
    if counts is not None and counts.get("by_position") is not None:
        counts["by_position"] = tuple(counts["by_position"])
    totals = None if done.get("totals") is None else RoundTotals(**done["totals"])
    return EnginePass(result, answers, totals, done.get("told") or {})


def record_of(request: Request, answer: Mapping[str, Any]) -> RequestRecord:
    """Make the record of a request from an engine's answer. Lists that the engine does not tell are empty."""
    emitted = answer.get("emitted") or []
    return RequestRecord(
        request_id=request.request_id,
        category=request.category,
        prompt_ids=list(request.prompt_ids),
        output_ids=answer["output_ids"],
        token_origins="",
        answer=request.answer,
        offered_per_round=answer.get("offered") or [],
        accepted_per_round=answer.get("accepted") or [],
        judged_per_round=answer.get("judged") or [],
        emitted_per_round=emitted,
        truncated=bool(emitted) and emitted[-1] < answer["accepted"][-1] + 1,
        finish_reason=FinishReason(answer["finish_reason"]),
        max_new_tokens=request.max_new_tokens,
        admitted_at=answer.get("admitted_at") or 0.0,
        emitted_at=answer.get("emitted_at") or [],
        arrived_at=answer.get("arrived_at") or 0.0,
        turn=request.turn,
    )
