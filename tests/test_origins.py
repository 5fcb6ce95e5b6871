"""Where each token came from, and which stretch of the text it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.types import AcceptanceInputs, Verification
from spec_lab.drafters.none import NoDrafter
from spec_lab.workloads.text_ends import text_ends
from spec_lab.workloads.tokenizer import IdsAlone, TargetTokenizer
from tests.fake_target import ScriptedDrafter, make_fake_engine
from tests.lab import random_requests

POCKET = Path(__file__).parents[1] / "spec_lab" / "zoo" / "pocket"


class SaysItRelaxed(StrictAcceptance):
    """Says so of every accepted draft with an odd id."""

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        strict = super().accept(inputs)
        reached = torch.arange(inputs.draft_tokens.shape[1]) < (strict.num_emitted - 1).unsqueeze(1)
        return Verification(strict.tokens, strict.num_emitted, (reached & (inputs.draft_tokens % 2 == 1)).long())


def letters(tokens: Sequence[int], num_accepted: int, num_draft_tokens: int, relaxes: bool) -> str:
    """What `SaysItRelaxed` makes of a round."""
    drafts = "".join("r" if relaxes and token % 2 else "a" for token in tokens[:num_accepted])
    return drafts + ("b" if num_accepted == num_draft_tokens else "c")


@pytest.mark.parametrize("relaxes", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_every_token_of_a_batch_has_its_origin(num_draft_tokens: int, relaxes: bool) -> None:
    """Requests of many lengths, in slots that are used again, some of them cut by an end of sequence or a limit."""
    engine, target = make_fake_engine(
        lambda target: ScriptedDrafter(num_draft_tokens, target, [0, 3, 1, 2]) if num_draft_tokens else NoDrafter()
    )
    if relaxes:
        engine.parts.rule = SaysItRelaxed()
    records = engine.generate(random_requests(9, 14, 1, target.vocab_size, lengths=(1, 20))).requests
    seen: set[str] = set()
    for record in records:
        assert len(record.token_origins) == len(record.output_ids) and record.token_origins[0] == "p"
        at = 1
        for num_accepted, num_emitted in zip(record.accepted_per_round, record.emitted_per_round, strict=True):
            tokens = record.output_ids[at : at + num_emitted]
            expected = letters(tokens, num_accepted, num_draft_tokens, relaxes)[:num_emitted]
            assert record.token_origins[at : at + num_emitted] == expected
            at += num_emitted
        seen |= set(record.token_origins)
    assert seen == {0: {"p", "b"}, 1: {"p", "b", "c", "a"}, 3: {"p", "b", "c", "a"}}[num_draft_tokens] | (
        {"r"} if relaxes and num_draft_tokens else set()
    )


@pytest.fixture(scope="module")
def pocket() -> TargetTokenizer:
    return TargetTokenizer(POCKET)


@given(text=st.text(max_size=40))
@settings(max_examples=60)
def test_stretches_of_any_text_add_up(pocket: TargetTokenizer, text: str) -> None:
    """Characters of several tokens too: what one token leaves unfinished, a later one completes."""
    ids = pocket.encode(text)
    decoded = pocket.decode(ids)
    ends = text_ends(pocket, ids, decoded)
    assert ends is not None and len(ends) == len(ids)
    assert ends == sorted(ends) and (not ends or ends[-1] == len(decoded))
    for index, end in enumerate(ends):
        whole = pocket.decode(ids[: index + 1])
        assert whole.rstrip("\ufffd").startswith(decoded[:end].rstrip("\ufffd"))


def test_ids_without_a_tokenizer_are_cut_too() -> None:
    assert text_ends(IdsAlone(100), [5, 17, 3], "5 17 3") == [1, 4, 6]


def test_a_text_that_the_tokens_do_not_make_is_unknown(pocket: TargetTokenizer) -> None:
    assert text_ends(pocket, pocket.encode("one"), "two") is None
    assert text_ends(pocket, [], "") == []
