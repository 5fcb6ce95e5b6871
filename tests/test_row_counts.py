"""How many rows each pruning computes, by part of the layer: the numbers that the tables of two studies print."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.core.results import RowCounts
from spec_lab.core.types import Request
from tests.lab import make_config, make_engine, make_pair

NUM_PROMPT_TOKENS, NUM_DRAFTS = 32, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def counted(pair: tuple[Path, Path], prune: str) -> tuple[int, RowCounts, RowCounts]:
    """The number of rounds, and the rows of the prompt pass and of all rounds, of one request."""
    request = Request("r", "c", tuple(range(3, 3 + NUM_PROMPT_TOKENS)), 12)
    engine = make_engine(make_config(pair, "eagle3", prune=prune, num_draft_tokens=NUM_DRAFTS), [request])
    result = engine.generate([request])
    rounds = RowCounts()
    for record in result.rounds:
        rounds.add(record.rows)
    return len(result.rounds), result.prefills[0].rows, rounds


@pytest.mark.parametrize(("prune", "computed", "logits"), [("none", 32, 32), ("prefill", 1, 1), ("catchup", 1, 1)])
def test_prompt_rows_past_the_last_kv_write(pair: tuple[Path, Path], prune: str, computed: int, logits: int) -> None:
    """An EAGLE-3 head reads features of all 32 rows, whether the last layer goes on with 32 of them or with one."""
    _, prompt, _ = counted(pair, prune)
    assert (prompt.prefill_computed, prompt.prefill_hidden, prompt.prefill_logits) == (computed, 32, logits)


@pytest.mark.parametrize(
    ("prune", "attention", "output", "mlp"),
    [("none", 4, 4, 4), ("prefill", 4, 4, 4), ("post_attention", 4, 1, 1), ("catchup", 1, 1, 1)],
)
def test_catchup_rows_by_part_of_the_layer(
    pair: tuple[Path, Path], prune: str, attention: int, output: int, mlp: int
) -> None:
    """Of the K + 1 rows of a request round: those that attend, and those that the products behind attention compute."""
    num_rounds, _, rows = counted(pair, prune)
    assert num_rounds > 2
    found = [count / num_rounds for count in (rows.catchup_attention, rows.catchup_output, rows.catchup_mlp)]
    assert found == [attention, output, mlp] and rows.catchup_live == num_rounds
