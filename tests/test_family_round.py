"""The table of rounds of Gemma 4 and Qwen3.5: floors, cells that compose, and a few cells of tiny targets on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.gemma4_assistant_config import AssistantTarget, read_assistant_config
from spec_lab.menu.refusals.run import refusals
from spec_lab.options.drafters.frozen_kv import ASSISTANT_SHAPES
from spec_lab.options.targets import SHAPES
from spec_lab.program.compose import compose_run
from tests import tiny_gemma4, tiny_hybrid
from tests.bench_modules import imported
from tests.test_random_weights import ASSISTANT

ON_CPU = ("device=cpu", "attention=torch", "kernels=torch", "num_threads=1")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("family_round", monkeypatch) as module:
        monkeypatch.setattr("round_bench.NUM_ROUNDS", 6)
        yield module


def test_floors_count_states_windows_and_gathered_rows(rounds: ModuleType) -> None:
    """Of Qwen3.5-9B a request's states are 50.3 MB; E4B gathers 42 rows of 256 a token, and a sliding layer of its 20
    that own their KV has 512 keys of 2 heads of 256; a 31B's draft step reads 939 MB of its assistant."""
    work = rounds.floor.target_work
    nine, e4b, large = (read_model_config(SHAPES / name) for name in ("qwen3_5_9b", "gemma4_e4b", "gemma4_31b"))
    assert work(nine, 1, 4, 0).num_bytes - work(nine, 1, 1, 0).num_bytes == 3 * 24 * 32 * 128 * 128 * 4
    saved = work(nine, 1, 4, 0).num_bytes - work(nine, 1, 4, 0, replays=True).num_bytes
    assert saved == 24 * 4 * (3 * 32 * 128 * 128 - 2 * 4 * (16 + 32) * 128)
    assert work(nine, 1, 1, 100).num_bytes - work(nine, 1, 1, 0).num_bytes == 8 * 100 * 2 * 4 * 256 * 2
    assert work(e4b, 1, 4, 0).num_bytes - work(e4b, 1, 1, 0).num_bytes == 3 * 42 * 256 * 2
    far, near = work(e4b, 1, 1, 900).num_bytes, work(e4b, 1, 1, 500).num_bytes
    assert far - near == 2 * 2 * 2 * (20 * 12 * 256 + 4 * 400 * 512)
    target = AssistantTarget.from_model_config(large)
    step = rounds.floor.assistant_work(read_assistant_config(ASSISTANT_SHAPES["gemma4_31b"], target), 1, 0)
    assert step.num_bytes == pytest.approx(939e6, rel=1e-3)
    assert work(large, 1, 1, 0).num_bytes == pytest.approx(61.4e9, rel=0.01)


def test_every_cell_composes(rounds: ModuleType) -> None:
    assert len({cell.name for cell in rounds.CELLS}) == len(rounds.CELLS)
    for cell in rounds.CELLS[::5]:
        config, _ = compose_run([*cell.overrides(), "dtype=bfloat16"])
        assert refusals(config) == []


def test_cells_of_tiny_targets_are_timed_once(
    rounds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States either way, and an assistant in two graph modes; what is there is not run again."""
    gemma = tiny_gemma4.TEXT | tiny_gemma4.KINDS["e4b"] | {"architectures": ["Gemma4ForCausalLM"]}
    hybrid = tiny_hybrid.SIZES | {"architectures": ["Qwen3_5ForCausalLM"]}
    folders: dict[str, dict[str, Any]] = {"gemma": gemma, "hybrid": hybrid, "assistant": ASSISTANT}
    for name, config in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    of_assistant = (*rounds.ASSISTANT, f"drafter.path={tmp_path / 'assistant'}")
    paths = {name: ("target=hf", f"target.path={tmp_path / name}", *ON_CPU) for name in folders}
    tiny_gemma = rounds.Model("gemma", paths["gemma"], of_assistant, prompt_tokens=6)
    tiny_nets = rounds.Model("hybrid", paths["hybrid"], prompt_tokens=6)
    nets = rounds.FamilyCell(tiny_nets, 2, 3, graph="eager")
    assisted = rounds.FamilyCell(tiny_gemma, 1, 3, graph="full_loop")
    cells = [nets, replace(nets, rollback="replay"), assisted, replace(assisted, graph="split_seed")]
    assert rounds.main([str(tmp_path / "out"), "--only", "replay"], cells) == 0
    assert rounds.main([str(tmp_path / "out"), "--profile"], cells) == 0
    assert capsys.readouterr().err.count("replay:") == 1
    rows = {row["cell"]: row for row in rounds.read_rows(tmp_path / "out" / "family_rounds.csv")}
    assert set(rows) == {cell.name for cell in cells}
    assert all(float(row["of floor"]) > 1 for row in rows.values())
    kept, replayed = (float(rows[cell.name]["of floor"]) / float(rows[cell.name]["round ms"]) for cell in cells[:2])
    assert replayed > kept, "replay moves less"
    assert int(rows[assisted.name]["nodes"]) > 0
    replays = {name: row["replays"] for name, row in rows.items()}
    assert [replays[cell.name] for cell in cells] == ["0", "-", "2", "2"], "the second cell was run before --profile"
    loop, split, launched = (int(rows[cell.name]["launches"]) for cell in (cells[2], cells[3], nets))
    assert 0 < loop < split < launched, "split_seed launches the first draft step"
    assert rows[nets.name]["idle ms"] == "-", "a CPU never idles"
