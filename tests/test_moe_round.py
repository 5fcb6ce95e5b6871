"""The table of rounds with experts: floors, cells that compose, and a few cells of a tiny target on a CPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import spec_lab
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.menu.refusals.run import refusals
from spec_lab.program.compose import compose_run
from tests.bench_modules import imported
from tests.tiny_latent import SIZES

SHAPES = Path(spec_lab.__file__).parent / "checkpoints" / "shapes"


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("moe_round", monkeypatch) as module:
        monkeypatch.setattr("round_bench.NUM_ROUNDS", 12)
        yield module


def test_floors_are_those_that_were_reckoned_by_hand(rounds: ModuleType) -> None:
    """Qwen3-30B-A3B reads 6.08 GB a token, GLM-4.7-Flash 7.15 GB (3.0 and 3.6 billion of active weights), and GLM's
    cache has 1,152 bytes a token and layer."""
    qwen, glm = (read_model_config(SHAPES / name) for name in ("qwen3_30b_a3b", "glm4_7_flash"))
    floor = importlib.import_module("floor")
    work = floor.target_work
    assert work(qwen, 1, 1, 0, 48 * 8).num_bytes == pytest.approx(6.08e9, rel=0.01)
    assert work(glm, 1, 1, 0, 46 * 4).num_bytes == pytest.approx(7.15e9, rel=0.01)
    assert work(glm, 3, 1, 1000).num_bytes - work(glm, 3, 1, 0).num_bytes == 3 * 1000 * 47 * 1152
    more = work(glm, 1, 4, 0, 46 * 14.6).num_bytes - work(glm, 1, 4, 0, 46 * 4).num_bytes
    assert more == pytest.approx(46 * 10.6 * 18.9e6, rel=0.01)
    module = floor.module_work
    assert (
        module(replace(glm, layers=glm.layers[-1:]), 1, 1, 0, 4).num_bytes
        > 2 * glm.vocab_size * glm.hidden_size + 4 * 18.8e6
    )


def test_every_cell_composes(rounds: ModuleType) -> None:
    assert len({cell.name for cell in rounds.CELLS}) == len(rounds.CELLS)
    for cell in rounds.CELLS[::13]:  # of every model, batch size, K and prune
        config, _ = compose_run([*cell.overrides(), "dtype=bfloat16"])
        assert refusals(config) == [] or cell.model is rounds.APART


def tiny_model(rounds: ModuleType, target: Path, graph: str) -> Any:
    target.mkdir()
    config = SIZES | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (target / "config.json").write_text(json.dumps(config))
    on_cpu = ("device=cpu", "attention=torch", "kernels=torch", f"graph={graph}", "num_threads=1")
    return rounds.Model("tiny", ("target=hf", f"target.path={target}", *on_cpu), prompt_tokens=6)


@pytest.mark.parametrize(("several", "code"), [((), 2), (("graph.rounds_per_replay=2",), 0)])
def test_rounds_behind_the_end_of_all_requests_are_refused_with_a_remedy_that_works(
    several: tuple[str, ...], code: int, rounds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [rounds.Cell(tiny_model(rounds, tmp_path / "target", "round"), 2, 3)]
    options = [str(tmp_path / "out"), "--with", "graph.overlap=true", *several]
    assert rounds.main([*options, "--dry-run"], cells) == code
    assert rounds.main(options, cells) == code
    assert (capsys.readouterr().err.count("add graph.rounds_per_replay=2") == 2) == (code == 2)


def test_cells_of_a_tiny_target_are_timed_once(
    rounds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one set of weights; what is there is not run again. A pruned catch-up reads fewer experts."""
    tiny = tiny_model(rounds, tmp_path / "target", "eager")
    apart = replace(tiny, name="apart", drafter=("drafter=random",), catches_up=False)
    cells = [
        rounds.Cell(tiny, 3, 0),
        rounds.Cell(tiny, 3, 3, "none"),
        rounds.Cell(tiny, 3, 3),
        rounds.Cell(apart, 3, 3),
    ]
    assert rounds.main([str(tmp_path / "out"), "--only", "no drafter"], cells) == 0
    assert rounds.main([str(tmp_path / "out")], cells) == 0
    assert capsys.readouterr().err.count("no drafter:") == 1
    rows = rounds.read_rows(tmp_path / "out" / "moe_rounds.csv")
    assert [row["cell"] for row in rows] == [cell.name for cell in cells]
    assert all(float(row["round ms"]) > 0 and float(row["experts"]) >= 3 * 3 for row in rows)
    none, pruned, apart_one = (float(row["catchup experts"]) for row in rows[1:])
    assert 3 <= pruned < none and apart_one == 0
    assert rounds.shown_rows(rows)[1][4] != "-"
    changed = [str(tmp_path / "out"), "--only", "no drafter", "--with"]
    assert rounds.main([*changed, "cache.page_size=8"], cells) == 0
    assert rounds.read_rows(tmp_path / "out" / "moe_rounds.csv")[-1]["cell"].endswith("no drafter, cache.page_size=8")
    rows = rounds.read_rows(tmp_path / "out" / "moe_rounds.csv")
    changed_row = {**rows[1], "cell": rows[1]["cell"] + ", cache.page_size=8", "verify ms": "1"}
    shown = {row[0]: row[4] for row in rounds.shown_rows([*rows, changed_row])}
    assert shown[rows[1]["cell"]] == f"{float(rows[1]['verify ms']) / float(rows[0]['verify ms']):.2f}"
    assert shown[changed_row["cell"]] == f"{1 / float(rows[-1]['verify ms']):.2f}"
    for options in ([], ["--dry-run"]):
        assert rounds.main([*changed, "cache.pagesize=8", *options], cells) == 2
        assert "did you mean cache.page_size?" in capsys.readouterr().err


def test_a_name_that_no_cell_has_is_an_error(rounds: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        rounds.main([str(tmp_path), "--only", "glm4_7_flash", "batch 17"])
