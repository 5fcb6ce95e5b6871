"""Strict acceptance and the standing of drafts on the device, against their references and against the lab's rules."""

from __future__ import annotations

import itertools

import pytest
import torch

from spec_kernels.relaxed import draft_standing, draft_standing_reference
from spec_kernels.strict import strict_accept, strict_accept_reference
from spec_kernels.vocabulary import VOCAB_TILE
from spec_lab.acceptance import standing
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.triton_rules import TritonStrictAcceptance, triton_standing
from spec_lab.core.types import AcceptanceInputs
from tests.kernel_lab import DEVICE, DTYPES, randn
from tests.tiers import checkerboard

SHAPES = [(1, 1, 5), (1, 4, 3), (3, 3, 257), (2, 6, VOCAB_TILE), (1, 4, 2 * VOCAB_TILE + 77), (1, 17, VOCAB_TILE + 1)]
"""(batch, N, vocab): one tile, ragged ones, a whole one, three, and one token behind a tile."""


def make_logits(batch: int, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random logits, rounded so that maxima tie; they are a view with strides of its own."""
    whole = (randn(batch + 1, num_rows + 1, vocab_size + 5, dtype=torch.float32) * 2).round().to(dtype)
    return whole[1:, 1:, :vocab_size]


def make_drafts(logits: torch.Tensor) -> torch.Tensor:
    """Drafts of which request 0 has all right, and request i the first i - 1; the wrong ones are tokens of the
    vocabulary too.
    """
    drafts = logits[:, :-1].float().argmax(dim=-1)
    for request in range(1, drafts.shape[0]):
        drafts[request, request - 1 :] = (drafts[request, request - 1 :] + 1) % logits.shape[-1]
    return drafts


def strict(
    logits: torch.Tensor, drafts: torch.Tensor, active: torch.Tensor, num_drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the strict kernel, into poisoned outputs."""
    batch, num_rows, _ = logits.shape
    tokens, num_emitted = torch.full((batch, num_rows), -7, device=DEVICE), torch.full((batch,), -7, device=DEVICE)
    strict_accept(tokens, num_emitted, logits, drafts, active, num_drafts)
    return tokens, num_emitted


@pytest.mark.parametrize(("shape", "dtype"), checkerboard(SHAPES, DTYPES))
def test_strict_is_the_rule_on_ragged_vocabularies_with_ties(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits = make_logits(*shape, dtype)
    drafts, active = make_drafts(logits), torch.arange(shape[0], device=DEVICE) != 1
    tokens, num_emitted = strict(logits, drafts, active)
    inputs = AcceptanceInputs(logits, drafts, active, slot_ids=active, kv_lens=active)
    rule, triton_rule = StrictAcceptance().accept(inputs), TritonStrictAcceptance().accept(inputs)
    reference = torch.empty_like(tokens), torch.empty_like(num_emitted)
    strict_accept_reference(*reference, logits, drafts, active, None)
    assert torch.equal(tokens, rule.tokens) and torch.equal(num_emitted, rule.num_emitted)
    assert torch.equal(tokens, reference[0]) and torch.equal(num_emitted, reference[1])
    assert torch.equal(tokens, triton_rule.tokens) and torch.equal(num_emitted, triton_rule.num_emitted)
    assert num_emitted[0] == shape[1]


@pytest.mark.parametrize("offered", range(4))
def test_strict_accepts_offered_drafts_only(offered: int) -> None:
    """Request 0 has all drafts right, request 1 none, 2 the first, 3 two; the tokens stay as they are."""
    logits = make_logits(4, 4, 19, torch.float32)
    drafts, active = make_drafts(logits), torch.ones(4, dtype=torch.bool, device=DEVICE)
    num_drafts = torch.full((4,), offered, device=DEVICE)
    tokens, num_emitted = strict(logits, drafts, active, num_drafts)
    inputs = AcceptanceInputs(logits, drafts, active, slot_ids=active, kv_lens=active, num_drafts=num_drafts)
    rule, triton_rule = StrictAcceptance().accept(inputs), TritonStrictAcceptance().accept(inputs)
    reference = torch.empty_like(tokens), torch.empty_like(num_emitted)
    strict_accept_reference(*reference, logits, drafts, active, num_drafts)
    for other in ((rule.tokens, rule.num_emitted), (triton_rule.tokens, triton_rule.num_emitted), reference):
        assert torch.equal(tokens, other[0]) and torch.equal(num_emitted, other[1])
    assert num_emitted.tolist() == [1 + min(offered, right) for right in (3, 0, 1, 2)]


@pytest.mark.parametrize("passing", list(itertools.product([False, True], repeat=3)))
def test_strict_counts_leading_matches_only(passing: tuple[bool, ...]) -> None:
    logits = make_logits(1, 4, 19, torch.float32)
    top = logits.argmax(dim=-1)[:, :-1]
    drafts = torch.where(torch.tensor(passing, device=DEVICE), top, top + 1)
    _, num_emitted = strict(logits, drafts, torch.ones(1, dtype=torch.bool, device=DEVICE))
    assert num_emitted.item() == 1 + len(list(itertools.takewhile(bool, passing)))


@pytest.mark.parametrize("pair", [(0, 1), (3, VOCAB_TILE), (VOCAB_TILE - 1, VOCAB_TILE), (VOCAB_TILE, VOCAB_TILE + 9)])
def test_of_equal_maxima_the_lowest_id_wins_within_a_tile_and_across(pair: tuple[int, int]) -> None:
    logits = torch.zeros(1, 2, VOCAB_TILE + 10, device=DEVICE)
    logits[..., list(pair)] = 5.0
    on_draft, off_draft = (torch.tensor([[token]], device=DEVICE) for token in pair)
    active = torch.ones(1, dtype=torch.bool, device=DEVICE)
    for drafts, expected in ((on_draft, 2), (off_draft, 1)):
        tokens, num_emitted = strict(logits, drafts, active)
        assert tokens.tolist() == [[pair[0], pair[0]]] and num_emitted.item() == expected
        standing_of = stand(logits, drafts)
        assert standing_of["rank"].item() == 2 - expected and standing_of["top_tokens"].tolist() == tokens.tolist()
        assert standing_of["probability"].item() == standing_of["top"].item(), "a tie is exact"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_padded_row_gives_a_token_of_the_vocabulary_and_counts_nothing(value: float) -> None:
    """So does NaN among numbers, as `torch.argmax` has it; the row beside it does not notice."""
    logits = make_logits(2, 3, VOCAB_TILE + 3, torch.float32).clone()
    alone = strict(logits[:1], make_drafts(logits)[:1], torch.ones(1, dtype=torch.bool, device=DEVICE))
    logits[1] = value
    tokens, num_emitted = strict(logits, make_drafts(logits), torch.tensor([True, False], device=DEVICE))
    assert tokens[1].tolist() == [0, 0, 0] and num_emitted.tolist() == [3, 0]
    assert torch.equal(tokens[:1], alone[0]) and torch.equal(num_emitted[:1], alone[1])
    logits[1] = 0.0
    logits[1, :, VOCAB_TILE + 1 :] = float("nan")
    tokens, _ = strict(logits, make_drafts(logits), torch.tensor([True, False], device=DEVICE))
    assert torch.equal(tokens, logits.argmax(dim=-1)) and tokens[1, 0] == VOCAB_TILE + 1


def stand(logits: torch.Tensor, drafts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the kernel of the drafts' standing, into poisoned outputs."""
    batch, num_rows, _ = logits.shape
    shape = (batch, num_rows - 1)
    outputs = {
        "is_top": torch.ones(shape, dtype=torch.bool, device=DEVICE),
        "rank": torch.full(shape, -7, device=DEVICE),
        "probability": torch.full(shape, float("nan"), device=DEVICE),
        "top": torch.full(shape, float("nan"), device=DEVICE),
        "top_tokens": torch.full((batch, num_rows), -7, device=DEVICE),
    }
    draft_standing(**outputs, logits=logits, draft_tokens=drafts)
    return outputs


@pytest.mark.parametrize(("shape", "dtype"), checkerboard(SHAPES, DTYPES))
def test_the_standing_of_drafts_is_the_rules(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Ranks are equal exactly, with many ties; probabilities to float32's rounding, whatever dtype the logits have."""
    logits = make_logits(*shape, dtype)
    generator = torch.Generator().manual_seed(5)
    drafts = torch.randint(shape[2], (shape[0], shape[1] - 1), generator=generator).to(DEVICE)
    drafts[:, ::2] = logits[:, :-1].float().argmax(dim=-1)[:, ::2]
    got = stand(logits, drafts)
    reference = {name: torch.empty_like(value) for name, value in got.items()}
    draft_standing_reference(**reference, logits=logits, draft_tokens=drafts)
    rule = standing.draft_standing(logits[:, :-1], drafts)
    for name in ("is_top", "rank", "top_tokens"):
        assert torch.equal(got[name], reference[name]), name
    for name in ("probability", "top"):
        torch.testing.assert_close(got[name], reference[name], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(got[name], getattr(rule, name), rtol=1e-5, atol=1e-12)
    assert torch.equal(got["is_top"], rule.is_top) and torch.equal(got["rank"], rule.rank)
    assert torch.equal(got["is_top"], got["rank"] == 0)
    as_rule, top_tokens = triton_standing(logits, drafts)
    assert torch.equal(top_tokens, got["top_tokens"])
    assert all(torch.equal(getattr(as_rule, name), got[name]) for name in ("is_top", "rank", "probability", "top"))


def test_tokens_outside_the_vocabulary_of_a_row_have_rank_and_no_probability() -> None:
    """A tile of nothing but -inf stands beside one with numbers."""
    logits = torch.full((1, 3, VOCAB_TILE + 4), float("-inf"), device=DEVICE)
    logits[..., -3:] = torch.tensor([1.0, 3.0, 2.0], device=DEVICE)
    got = stand(logits, torch.tensor([[VOCAB_TILE + 3, 7]], device=DEVICE))
    assert got["rank"].tolist() == [[1, 3 + 7]] and got["top_tokens"].tolist() == [[VOCAB_TILE + 2] * 3]
    weights = torch.tensor([1.0, 3.0, 2.0]).softmax(0)
    assert got["probability"][0, 1] == 0 and got["probability"][0, 0].item() == pytest.approx(weights[2].item())
    assert got["top"][0].tolist() == pytest.approx([weights[1].item()] * 2)


def test_a_request_does_not_depend_on_what_is_beside_it() -> None:
    logits = make_logits(3, 4, VOCAB_TILE + 50, torch.float32) * 0.37
    drafts = make_drafts(logits)
    together = stand(logits, drafts)
    alone = [stand(logits[i : i + 1], drafts[i : i + 1]) for i in range(3)]
    for name, value in together.items():
        assert torch.equal(value, torch.cat([part[name] for part in alone])), name
