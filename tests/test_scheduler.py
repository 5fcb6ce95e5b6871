"""Host state: admission, pages, and what a round's tokens do to a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from spec_lab.core.types import FinishReason, Request, Sequence
from spec_lab.engine.scheduler import emit_round

EOS = frozenset({2, 4})


def make_sequence(num_output: int = 1, max_new_tokens: int = 10, ignore_eos: bool = False, last: int = 9) -> Sequence:
    request = Request("r", "x", (7, 8), max_new_tokens, ignore_eos=ignore_eos)
    tokens = [7, 8] + [9] * (num_output - 1) + [last]
    return Sequence(request, 0, [], 0.0, tokens=tokens, kv_len=len(tokens) - 1, num_prefilled=2)


@pytest.mark.parametrize(
    ("tokens", "options", "kept", "num_judged", "reason", "truncated"),
    [
        ([5, 6, 7], {}, [5, 6, 7], 3, None, False),
        ([5], {}, [5], 1, None, False),
        ([5, 2, 7], {}, [5, 2], 2, FinishReason.EOS, True),
        ([4, 2, 7], {}, [4], 1, FinishReason.EOS, True),
        ([5, 6, 2], {}, [5, 6, 2], 3, FinishReason.EOS, False),
        ([5, 2, 7], {"ignore_eos": True}, [5, 2, 7], 3, None, False),
        ([5, 6, 7], {"max_new_tokens": 3}, [5, 6], 3, FinishReason.LENGTH, True),
        ([5, 6, 7], {"max_new_tokens": 4}, [5, 6, 7], 3, FinishReason.LENGTH, False),
        ([5, 6, 2], {"max_new_tokens": 3}, [5, 6], 3, FinishReason.LENGTH, True),
        ([5, 6, 2, 7], {"max_new_tokens": 3}, [5, 6], 3, FinishReason.LENGTH, True),
        ([5, 2, 7], {"max_new_tokens": 3}, [5, 2], 2, FinishReason.EOS, True),
        ([5, 2, 7], {"max_new_tokens": 3, "ignore_eos": True}, [5, 2], 3, FinishReason.LENGTH, True),
    ],
)
def test_a_round_is_cut_at_eos_and_at_the_limit(
    tokens: list[int],
    options: dict[str, Any],
    kept: list[int],
    num_judged: int,
    reason: FinishReason | None,
    truncated: bool,
) -> None:
    sequence, origins = make_sequence(**options), "a" * (len(tokens) - 1) + "c"
    emit_round(sequence, tokens, origins, EOS, now=2.5, num_offered=4)
    assert sequence.tokens[3:] == kept
    assert sequence.origins == origins[: len(kept)]
    assert sequence.finish_reason == reason
    assert sequence.truncated == truncated
    assert sequence.offered_per_round == [4]
    assert sequence.accepted_per_round == [len(tokens) - 1]
    assert sequence.judged_per_round == [num_judged]
    assert sequence.emitted_per_round == [len(kept)]
    assert sequence.emitted_at == [2.5]
    assert sequence.kv_len == 2 + len(tokens), "the device committed the whole block"


@pytest.mark.parametrize(
    ("tokens", "options", "kept", "reason"),
    [
        ([2, 4, 7], {}, [2, 4, 7], None),
        ([2, 4, 2], {}, [2, 4, 2], FinishReason.EOS),
        ([2], {}, [2], FinishReason.EOS),
        ([2, 4, 7], {"max_new_tokens": 3}, [2, 4], FinishReason.LENGTH),
        ([2, 4, 2], {"max_new_tokens": 4}, [2, 4, 2], FinishReason.EOS),
        ([2, 4, 2], {"ignore_eos": True}, [2, 4, 2], None),
    ],
)
def test_an_imposed_token_ends_no_request(
    tokens: list[int], options: dict[str, Any], kept: list[int], reason: FinishReason | None
) -> None:
    """All but the last, which is the target's own."""
    sequence = make_sequence(**options)
    emit_round(sequence, tokens, "a" * len(tokens), EOS, now=2.5, num_offered=2, num_imposed=len(tokens) - 1)
    assert sequence.tokens[3:] == kept
    assert sequence.finish_reason == reason
    assert sequence.judged_per_round == [len(tokens)]
