"""The scheduler: which requests wait, which hold a slot, and how each round's tokens change them.

It runs on the host and uses no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from spec_lab.core.errors import UserError
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.origins import TokenOrigin
from spec_lab.core.types import FinishReason, Request, Sequence
from spec_lab.engine.pages import PageAllocator


class Scheduler:
    """Admits requests in order of arrival. A request waits until a slot and all pages it can ever need are free."""

    def __init__(
        self,
        num_slots: int,
        allocator: PageAllocator,
        page_size: int,
        max_seq_len: int,
        margin: int,
        max_in_flight: int | None = None,
    ) -> None:
        """Keep the sizes.

        Args:
            margin: positions past a request's last token that a round may write, as in `spec_lab.build.limits`.
            max_in_flight: while so many have arrived and not ended, the next one does not arrive; None for no bound.
        """
        self._max_in_flight = max_in_flight
        self._coming: deque[Request] = deque()
        self._is_full = False
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.allocator = allocator
        self._page_size = page_size
        self.max_seq_len = max_seq_len
        self._margin = margin
        self._waiting: deque[tuple[Request, float | None]] = deque()
        self.running: list[Sequence] = []

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raise UserError, and queue none of them, if one could never run."""
        requests = list(requests)
        for request in requests:
            self.check(request)
        self._coming.extend(requests)

    @property
    def has_work(self) -> bool:
        return bool(self._coming or self._waiting or self.running)

    def seconds_to_arrival(self, now: float) -> float:
        """Return how long it is until the next request arrives, if no other one ends before."""
        return max(0.0, (self._coming[0].arrives_at or 0.0) - now) if self._coming else 0.0

    def admit(self, now: float) -> list[Sequence]:
        """Move requests that have arrived into free slots."""
        self._arrive(now)
        admitted = []
        while self._waiting and self.free_slots:
            request, arrived_at = self._waiting[0]
            num_pages = self._num_pages(request)
            if num_pages > self.allocator.num_free:
                break
            self._waiting.popleft()
            slot, pages = self.free_slots.pop(), self.allocator.take(num_pages)
            sequence = Sequence(request, slot, pages, admitted_at=now, tokens=list(request.prompt_ids))
            sequence.arrived_at = now if arrived_at is None else arrived_at
            admitted.append(sequence)
        self.running.extend(admitted)
        return admitted

    def _arrive(self, now: float) -> None:
        """Let requests arrive whose time has come. One that the bound held back arrives now."""
        most = self._max_in_flight
        while self._coming and (self._coming[0].arrives_at or 0.0) <= now:
            if most is not None and len(self._waiting) + len(self.running) >= most:
                self._is_full = True
                return
            request = self._coming.popleft()
            arrives_at = now if self._is_full and request.arrives_at is not None else request.arrives_at
            self._waiting.append((request, arrives_at))
        self._is_full = False

    def release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        self.allocator.give_back(sequence.pages)

    def abort(self) -> None:
        """Drop all requests, so that the engine can be used again after an error."""
        self._coming.clear()
        self._waiting.clear()
        for sequence in list(self.running):
            self.release(sequence)

    def _num_pages(self, request: Request) -> int:
        longest = len(request.prompt_ids) + request.max_new_tokens + self._margin
        return -(-longest // self._page_size)

    def check(self, request: Request) -> None:
        """Raise UserError for a request that could never run."""
        longest = len(request.prompt_ids) + request.max_new_tokens
        if not request.prompt_ids:
            raise UserError(f"request {request.request_id} has an empty prompt; give it at least one token")
        if request.max_new_tokens < 1:
            raise UserError(f"request {request.request_id}: max_new_tokens={request.max_new_tokens}; ask for 1 or more")
        if longest > self.max_seq_len:
            raise UserError(
                f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens and "
                f"max_new_tokens={request.max_new_tokens} need {longest} positions, but the cache has "
                f"{self.max_seq_len}; raise cache.max_seq_len to {longest}"
            )
        needed, usable = self._num_pages(request), self.allocator.num_total
        if needed > usable:
            raise UserError(
                f"request {request.request_id} needs {needed} pages with {self._page_size} tokens each, but the cache "
                f"has {usable + NUM_RESERVED_PAGES} pages, of which {NUM_RESERVED_PAGES} are reserved; raise "
                f"cache.num_pages to {needed + NUM_RESERVED_PAGES}"
            )


def emit_first(sequence: Sequence, eos_token_ids: frozenset[int], now: float) -> None:
    """Account for the token that the prompt pass sampled and appended. It may end the request."""
    sequence.origins += TokenOrigin.PROMPT_PASS
    sequence.emitted_at.append(now)
    _, sequence.finish_reason = _end_of_text(sequence.request, [], sequence.tokens[-1:], eos_token_ids, 0)
    _heed_limit(sequence)


def emit_round(
    sequence: Sequence,
    tokens: list[int],
    origins: str,
    eos_token_ids: frozenset[int],
    now: float,
    num_offered: int,
    num_imposed: int = 0,
    confidences: list[float] | None = None,
) -> None:
    """Account for one round's n = len(tokens) tokens: append them up to an end or the limit, and commit n KV rows.

    The first `num_imposed` tokens were accepted without being judged. An EOS or a stop among them does not end the
    request.

    Args:
        origins: a letter of `core.origins` for each of the tokens.
        num_offered: drafts of the round that could have been accepted.
        confidences: of the round's first drafts, at least of those offered; None if nothing reads them.
    """
    assert tokens, "an active request emits at least one token"
    assert len(origins) == len(tokens) <= num_offered + 1
    request = sequence.request
    before: list[int] = []
    if request.stops is not None:
        before = sequence.tokens[max(len(request.prompt_ids), len(sequence.tokens) - request.stops.num_decoded) :]
    num_judged, end = _end_of_text(request, before, tokens, eos_token_ids, num_imposed)
    kept = tokens[: min(num_judged, request.max_new_tokens - sequence.num_output_tokens)]
    sequence.tokens.extend(kept)
    sequence.origins += origins[: len(kept)]
    sequence.kv_len += len(tokens)
    sequence.offered_per_round.append(num_offered)
    sequence.confidence_per_round.append((confidences or [])[:num_offered])
    sequence.accepted_per_round.append(len(tokens) - 1)
    sequence.judged_per_round.append(num_judged)
    sequence.emitted_per_round.append(len(kept))
    sequence.emitted_at.append(now)
    sequence.truncated = len(kept) < len(tokens)
    sequence.finish_reason = end if len(kept) == num_judged else None
    _heed_limit(sequence)
    assert sequence.finish_reason is not None or len(sequence.tokens) == sequence.kv_len + 1


def _end_of_text(
    request: Request, before: list[int], tokens: list[int], eos_token_ids: frozenset[int], num_imposed: int
) -> tuple[int, FinishReason | None]:
    """Find the first of `tokens` after the imposed ones that ends the text of a request, which `before` ends so far.

    Returns:
        The number of tokens up to and including it, and the reason; all tokens and None if there is none.
    """
    for length, token in enumerate(tokens[num_imposed:], start=num_imposed + 1):
        if token in eos_token_ids and not request.ignore_eos:
            return length, FinishReason.EOS
        is_text_stop = request.stops is not None and request.stops.completed_by_last([*before, *tokens[:length]])
        if is_text_stop or token in request.stop_token_ids:
            return length, FinishReason.STOP
    return len(tokens), None


def _heed_limit(sequence: Sequence) -> None:
    if sequence.finish_reason is None and sequence.num_output_tokens >= sequence.request.max_new_tokens:
        sequence.finish_reason = FinishReason.LENGTH
