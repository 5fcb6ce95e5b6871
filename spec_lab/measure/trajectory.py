"""Records the verify rows of a workload's first requests, outside the timed part (`record.topk`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.core.protocols import AcceptanceRule
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import AcceptanceInputs, Request, Verification
from spec_lab.engine.engine import Engine
from spec_lab.record.verify_rows import MAX_BYTES, RowsOrigin, VerifyRows, num_bytes_per_round


class RowKeeper:
    """Wraps an acceptance rule, and stores the rule's inputs and decisions on the host.

    Attributes:
        first_ids: the token sampled by the prompt pass, by request id.
        rounds: for each round the request ids, then the parts of `VerifyRows`, with an entry for each active request.
    """

    def __init__(self, rule: AcceptanceRule, topk: int) -> None:
        self.traits = rule.traits
        self.first_ids: dict[str, int] = {}
        self.rounds: list[tuple[list[str], dict[str, torch.Tensor]]] = []
        self._rule = rule
        self._topk = topk
        self._in_slot: dict[int, str] = {}

    def admit(self, slot: int, request: Request) -> None:
        self._rule.admit(slot, request)
        self._in_slot[slot] = request.request_id

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        tokens = self._rule.first_tokens(logits, slot_ids, kv_lens)
        for slot, token in zip(slot_ids.tolist(), tokens.tolist(), strict=True):
            self.first_ids[self._in_slot[slot]] = token
        return tokens

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        verification = self._rule.accept(inputs)
        ids, probabilities = likeliest(inputs.logits, self._topk)
        accepted = (verification.num_emitted - 1).clamp(min=0)
        parts = {
            "draft_ids": inputs.draft_tokens.int(),
            "accepted": accepted.int(),
            "last_ids": verification.tokens.gather(1, accepted.unsqueeze(1)).squeeze(1).int(),
            "top_ids": ids.int(),
            "top_probabilities": probabilities,
        }
        active = inputs.active
        request_ids = [self._in_slot[slot] for slot in inputs.slot_ids[active].tolist()]
        self.rounds.append((request_ids, {name: part[active].cpu() for name, part in parts.items()}))
        return verification


def likeliest(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `topk` likeliest tokens of [..., vocab] logits, lowest id first among equals, and their probabilities.

    Tokens are ranked by logits, as in `draft_standing`, since different logits can give the same float32 probability.
    """
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :topk]
    return ids, torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)


def record_verify_rows(
    engine: Engine, requests: Sequence[Request], topk: int, markers: ThinkingMarkers | None, prefill_chunk: int
) -> VerifyRows:
    """Decode `requests` once more and keep each row's `topk` likeliest tokens."""
    rule = engine.parts.rule
    keeper = engine.parts.rule = RowKeeper(rule, topk)
    try:
        engine.generate(requests)
    finally:
        engine.parts.rule = rule
    origin = RowsOrigin(
        request_ids=[request.request_id for request in requests],
        markers=None if markers is None else (markers.begin, markers.end),
        eos_token_ids=sorted(engine.parts.target.eos_token_ids),
        prefill_chunk=prefill_chunk,
    )
    return _by_request(origin, keeper, engine.num_draft_tokens + 1, min(topk, engine.parts.target.vocab_size))


def fitting(
    requests: Sequence[Request], records: Iterable[RequestRecord], num_draft_tokens: int, topk: int
) -> list[Request]:
    """Return the first of `requests` whose rows fit into the file's limit, estimated from their rounds in `records`."""
    left = MAX_BYTES
    chosen = []
    for request, record in zip(requests, records, strict=True):
        left -= len(record.emitted_per_round) * num_bytes_per_round(num_draft_tokens, topk)
        if left < 0:
            break
        chosen.append(request)
    return chosen


def _by_request(origin: RowsOrigin, keeper: RowKeeper, num_rows: int, topk: int) -> VerifyRows:
    """Regroup the recorded rounds by request."""
    index = {request_id: number for number, request_id in enumerate(origin.request_ids)}
    owners = np.array([index[request_id] for request_ids, _ in keeper.rounds for request_id in request_ids], dtype=int)
    order = np.argsort(owners, kind="stable")
    empty = {
        "draft_ids": torch.zeros((0, num_rows - 1), dtype=torch.int32),
        "accepted": torch.zeros(0, dtype=torch.int32),
        "last_ids": torch.zeros(0, dtype=torch.int32),
        "top_ids": torch.zeros((0, num_rows, topk), dtype=torch.int32),
        "top_probabilities": torch.zeros((0, num_rows, topk)),
    }
    joined = {
        name: torch.cat([none, *(parts[name] for _, parts in keeper.rounds)]).numpy()[order]
        for name, none in empty.items()
    }
    return VerifyRows(
        origin=origin,
        first_ids=np.array([keeper.first_ids[request_id] for request_id in origin.request_ids], dtype=np.int32),
        num_rounds=np.bincount(owners, minlength=len(index)).astype(np.int32),
        **joined,
    )
