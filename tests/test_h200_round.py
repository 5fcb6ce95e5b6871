"""The table of rounds on an H200: its floors, and that a cell once measured is not measured again."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from spec_lab.app.compose import compose
from spec_lab.config.checks import problems
from tests.bench_modules import imported


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("h200_round", monkeypatch) as module:
        yield module


def test_floors_are_those_that_were_reckoned_by_hand(rounds: ModuleType) -> None:
    """Of weights alone 3.57 ms without a drafter, 4.13 with three drafts and 4.5 with five; here with a few keys."""
    for drafts, length, expected in ((0, 1.0, 3.57), (3, 2.5, 4.13), (5, 3.5, 4.49)):
        few_keys = rounds.Cell(drafts, length, 1, prompt_tokens=1, max_new_tokens=2)
        assert few_keys.floor_ms() == pytest.approx(expected, abs=0.01)


def test_a_floor_of_fp8_has_half_the_bytes_of_the_layers(rounds: ModuleType) -> None:
    """They are 6.98 G numbers, with a float32 for 16 384 of them."""
    plain, narrow = (rounds.Cell(3, 2.5, 1, changes=changes) for changes in ((), ("target.weight_dtype=fp8",)))
    saved = 6.979e9 * (2 - 1 - 4 / 128**2) / 4.2e12
    assert plain.floor_ms() - narrow.floor_ms() == pytest.approx(1e3 * saved, rel=1e-3)


def test_floors_of_prompts_are_products_and_causal_attention(rounds: ModuleType) -> None:
    """Of the 8B shape 6.98e9 weights without embedding and head, and 4 operations a channel and pair of tokens."""
    for num_tokens, expected in ((32_768, 0.94), (120_000, 6.9)):
        cell = rounds.Cell(3, 2.5, 1, num_tokens)
        flops = 2 * 6.98e9 * num_tokens + 4 * 32 * 32 * 128 * num_tokens**2 / 2
        assert cell.prompt_floor_ms() == pytest.approx(1e3 * flops / 790e12, rel=1e-3)
        assert cell.prompt_floor_ms() == pytest.approx(1e3 * expected, rel=0.01)


def test_every_cell_composes(rounds: ModuleType) -> None:
    assert len({cell.name for cell in rounds.CELLS}) == len(rounds.CELLS)
    for cell in rounds.CELLS:
        config = compose([*cell.overrides(), "dtype=bfloat16"]).config
        assert list(problems(config)) == []
