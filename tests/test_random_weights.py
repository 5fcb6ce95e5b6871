"""Targets and heads with random weights: only config.json is read, and no tokenizer is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.assembly.targets import SHAPES
from spec_lab.models.families.table import read_model_config
from spec_lab.models.tensor_shapes import decoder_tensor_shapes
from spec_lab.record.runs import read_summary
from tests.tiny_checkpoints import TINY_SIZES, make_tiny_target
from tests.tiny_experts import QWEN

IDS = ["workload=random_ids", "workload.prompt_tokens=12", "workload.num_requests=2"]
CHEAP = [
    "max_new_tokens=10",
    "repeats=1",
    "warmup_requests=0",
    "profile_rounds=0",
    "references=[]",
    "device=cpu",
    "num_threads=1",
]
RANDOM = ["target.weights=random", "drafter.weights=random"]


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """Make a folder with a config.json and nothing else."""
    make_tiny_target(tmp_path / "whole", "qwen3", num_hidden_layers=7)
    (tmp_path / "shape").mkdir()
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    return tmp_path / "shape"


@pytest.mark.parametrize("vocabulary", [[], ["drafter.draft_vocab_size=40"]])
def test_any_config_json_runs_with_random_weights(vocabulary: list[str], shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    target = ["target=hf", f"target.path={shape}", *RANDOM, *vocabulary]
    assert main([*target, *IDS, *CHEAP, f"output_dir={out}"]) == 0
    [summary] = [read_summary(file.parent) for file in out.rglob("summary.json")]
    assert summary["status"] == "finished"
    assert summary["divergence"] is not None  # without a plain reference, the target judges its own text
    assert summary["divergence"]["bugs"] == 0


@pytest.mark.slow
def test_a_shape_with_experts_prints_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its random EAGLE-3 head has none."""
    (tmp_path / "shape").mkdir()
    config = TINY_SIZES | QWEN | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 7}
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    target = ["target=hf", f"target.path={tmp_path / 'shape'}", *RANDOM, "prune=catchup", "graph=round"]
    assert main([*target, *IDS, *CHEAP, f"output_dir={out}"]) == 0
    assert "experts read a round" in capsys.readouterr().out
    [summary] = [read_summary(file.parent) for file in out.rglob("summary.json")]
    read = summary["experts_read"]
    assert read is not None and 7 * 3 < read["verify"] <= 7 * 8
    assert read["catchup"] == read["recur"] == 0


def test_a_workload_of_text_is_refused_in_a_line(shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["target=hf", f"target.path={shape}", *RANDOM, *CHEAP]) == 2
    assert "no tokenizer, so there is no text to read; use workload=random_ids" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_runs_on_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One whose tokenizer needs code of its own has no tokenizer.json either."""
    make_tiny_target(tmp_path / "model", "qwen3", num_hidden_layers=2)
    target = ["target=hf", f"target.path={tmp_path / 'model'}", "drafter=ngram", f"output_dir={tmp_path / 'out'}"]
    assert main([*target, *IDS, *CHEAP]) == 0
    assert main([*target, *CHEAP]) == 2
    assert "tokenizer.json is missing" in (said := capsys.readouterr().err) and "workload=random_ids" in said


def test_more_draft_tokens_than_the_target_has_are_refused(shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["target=hf", f"target.path={shape}", *RANDOM, "drafter.draft_vocab_size=1000000"]
    assert main([*target, *IDS, *CHEAP]) == 2
    assert "drafter.draft_vocab_size=null" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3_8b", 8.03), ("qwen3_8b", 8.19), ("llama3_70b", 70.55), ("glm4_7_flash", 29.94), ("qwen3_30b_a3b", 30.53)],
)
def test_a_shape_has_the_parameters_of_its_model(name: str, billions: float) -> None:
    """They are as many as the model's card counts."""
    shapes = decoder_tensor_shapes(read_model_config(SHAPES / name))
    total = 0
    for shape in shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    assert total / 1e9 == pytest.approx(billions, abs=0.01)
