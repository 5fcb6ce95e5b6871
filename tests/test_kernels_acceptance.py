"""Strict acceptance and the standing of drafts on the device, at the edges of a vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch

from spec_kernels.relaxed import draft_standing
from spec_kernels.strict import strict_accept
from spec_kernels.vocabulary import VOCAB_TILE
from tests.kernel_lab import DEVICE
from tests.test_operators import ragged_logits, right_drafts


def stand(logits: torch.Tensor, drafts: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(
        zip(("is_top", "rank", "probability", "top", "top_tokens"), draft_standing(logits, drafts), strict=True)
    )


@pytest.mark.parametrize("passing", list(itertools.product([False, True], repeat=3)))
def test_strict_counts_leading_matches_only(passing: tuple[bool, ...]) -> None:
    logits = ragged_logits(1, 4, 19)
    top = logits.argmax(dim=-1)[:, :-1]
    drafts = torch.where(torch.tensor(passing, device=DEVICE), top, top + 1)
    _, num_emitted = strict_accept(logits, drafts, torch.ones(1, dtype=torch.bool, device=DEVICE))
    assert num_emitted.item() == 1 + len(list(itertools.takewhile(bool, passing)))


@pytest.mark.parametrize("pair", [(0, 1), (3, VOCAB_TILE), (VOCAB_TILE - 1, VOCAB_TILE), (VOCAB_TILE, VOCAB_TILE + 9)])
def test_of_equal_maxima_the_lowest_id_wins_within_a_tile_and_across(pair: tuple[int, int]) -> None:
    logits = torch.zeros(1, 2, VOCAB_TILE + 10, device=DEVICE)
    logits[..., list(pair)] = 5.0
    on_draft, off_draft = (torch.tensor([[token]], device=DEVICE) for token in pair)
    active = torch.ones(1, dtype=torch.bool, device=DEVICE)
    for drafts, expected in ((on_draft, 2), (off_draft, 1)):
        tokens, num_emitted = strict_accept(logits, drafts, active)
        assert tokens.tolist() == [[pair[0], pair[0]]] and num_emitted.item() == expected
        standing_of = stand(logits, drafts)
        assert standing_of["rank"].item() == 2 - expected and standing_of["top_tokens"].tolist() == tokens.tolist()
        assert standing_of["probability"].item() == standing_of["top"].item(), "a tie is exact"


def test_a_row_of_three_tiles_reads_none_of_the_next_row() -> None:
    """Its tiles are looked at four at once, and what stands behind them is larger."""
    logits = torch.zeros(1, 2, 2 * VOCAB_TILE + 5, device=DEVICE)
    logits[0, 0, 7], logits[0, 1, 9] = 1.0, 2.0
    drafts, active = torch.tensor([[7]], device=DEVICE), torch.ones(1, dtype=torch.bool, device=DEVICE)
    tokens, num_emitted = strict_accept(logits, drafts, active)
    assert tokens.tolist() == stand(logits, drafts)["top_tokens"].tolist() == [[7, 9]] and num_emitted.item() == 2


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_padded_row_gives_a_token_of_the_vocabulary_and_counts_nothing(value: float) -> None:
    """So does NaN among numbers, as `torch.argmax` has it; the row beside it does not notice."""
    logits = ragged_logits(2, 3, VOCAB_TILE + 3).clone()
    alone = strict_accept(logits[:1], right_drafts(logits)[:1], torch.ones(1, dtype=torch.bool, device=DEVICE))
    logits[1] = value
    tokens, num_emitted = strict_accept(logits, right_drafts(logits), torch.tensor([True, False], device=DEVICE))
    assert tokens[1].tolist() == [0, 0, 0] and num_emitted.tolist() == [3, 0]
    assert torch.equal(tokens[:1], alone[0]) and torch.equal(num_emitted[:1], alone[1])
    logits[1] = 0.0
    logits[1, :, VOCAB_TILE + 1 :] = float("nan")
    tokens, _ = strict_accept(logits, right_drafts(logits), torch.tensor([True, False], device=DEVICE))
    assert torch.equal(tokens, logits.argmax(dim=-1)) and tokens[1, 0] == VOCAB_TILE + 1


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
    logits = ragged_logits(3, 4, VOCAB_TILE + 50) * 0.37
    drafts = right_drafts(logits)
    together = stand(logits, drafts)
    alone = [stand(logits[i : i + 1], drafts[i : i + 1]) for i in range(3)]
    for name, value in together.items():
        assert torch.equal(value, torch.cat([part[name] for part in alone])), name
