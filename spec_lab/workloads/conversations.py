"""Conversations of several turns. Each later turn becomes a separate request, whose prompt has the answers before it.

These answers are from plain decoding, made once before anything is timed. So all configurations of a run get the same
prompts. With greedy decoding, a lossless one gets the same conversation that it would have had by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from spec_lab.config.choices import Unusable
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.workloads.tokenizer import Tokenizer
from spec_lab.workloads.unusable import keep_usable

TOKENS_OF_A_TOKEN = 3
"""The most tokens that an output token can become when its text is encoded again. A token that is not a whole character
is decoded to a replacement character, which has three bytes."""

Answer = Callable[[list[Request]], list[str]]
"""Returns the target's outputs for some requests, as texts."""


@dataclass(slots=True)
class _Conversation:
    """A conversation in progress.

    Attributes:
        texts: the turns so far, alternately of user and assistant.
        asked: its requests so far, one for each turn.
    """

    texts: list[str]
    asked: list[Request]


def longest_conversation(requests: Iterable[Request], tokenizer: Tokenizer) -> int:
    """Return the largest number of tokens that a conversation can have with any answers; 0 if there is none with
    several turns."""
    return max((_most_tokens(request, tokenizer) for request in requests if request.turns), default=0)


def with_later_turns(
    requests: Sequence[Request], tokenizer: Tokenizer, answer: Answer, max_seq_len: int, unusable: Unusable
) -> list[Request]:
    """Return the requests, each followed by those of its later turns.

    Raises:
        UserError: a turn is longer than `max_seq_len`, and is not to be left out.
    """
    conversations = {r.request_id: _Conversation([r.turns[0]], [r]) for r in requests if r.turns}
    for index in range(1, max((len(request.turns) for request in requests), default=0)):
        going_on = [each for each in conversations.values() if len(each.asked) == index < len(each.asked[0].turns)]
        for each, text in zip(going_on, answer([each.asked[-1] for each in going_on]), strict=True):
            each.texts += [text, each.asked[0].turns[index]]
        following = keep_usable(going_on, lambda each: (each, _next_request(each, tokenizer, max_seq_len)), unusable)
        for conversation, request in following:
            conversation.asked.append(request)
    alone = {request.request_id: _Conversation([], [request]) for request in requests}
    return [turn for each in (alone | conversations).values() for turn in each.asked]


def before_end(output_ids: Sequence[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the output up to its first end of sequence, which a chat template writes itself."""
    return list(takewhile(lambda token_id: token_id not in eos_token_ids, output_ids))


def output_text(
    tokenizer: Tokenizer, request: Request, output_ids: Sequence[int], eos_token_ids: frozenset[int]
) -> str:
    """Return the text of an output up to its first end of sequence or stop."""
    text = tokenizer.decode(before_end(output_ids, eos_token_ids | request.stop_token_ids))
    return text if request.stops is None else request.stops.cut(text)


def _next_request(conversation: _Conversation, tokenizer: Tokenizer, max_seq_len: int) -> Request:
    first, number = conversation.asked[0], len(conversation.asked) + 1
    prompt_ids = tuple(tokenizer.encode_conversation(conversation.texts, first.system))
    name = f"{first.request_id}-turn{number}"
    request = replace(first, request_id=name, prompt_ids=prompt_ids, answer=None, turns=(), checker=None, turn=number)
    return require_room(request, max_seq_len)


def num_tokens(request: Request) -> int:
    """Return the most tokens that a request can have, prompt and output."""
    return len(request.prompt_ids) + request.max_new_tokens


def require_room(request: Request, most: int) -> Request:
    """Return the request; UserError if it is longer than target and cache allow."""
    if num_tokens(request) > most:
        raise UserError(
            f"request {request.request_id}: {len(request.prompt_ids)} prompt and {request.max_new_tokens} new tokens "
            f"are longer than {most}; lower max_new_tokens, raise cache.max_seq_len, or use workload.unusable=skip"
        )
    return request


def _most_tokens(request: Request, tokenizer: Tokenizer) -> int:
    alone = sum(len(tokenizer.encode_conversation([text], request.system)) for text in request.turns)
    num_answers = len(request.turns) - 1
    return alone + (TOKENS_OF_A_TOKEN * num_answers + 1) * request.max_new_tokens
