"""Experts in a file one by one, or a layer's in one tensor: read alike, and refused with what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spec_lab.checkpoints.checkpoint import check_tensors, read_tensors, stored_tensors
from spec_lab.checkpoints.plan import ExpertSizes, RouterScores
from spec_lab.checkpoints.tensor_shapes import routed_tensor_shapes
from tests.tiny_checkpoints import refused

PREFIX = "model.layers.3.mlp."
WANTED = {
    PREFIX + name: shape for name, shape in routed_tensor_shapes(ExpertSizes(12, 2, 6, RouterScores.SOFTMAX), 8).items()
}
GATE_UP, DOWN = WANTED


def one_by_one() -> dict[str, torch.Tensor]:
    """Twelve experts, so that their numbers are sorted as numbers and not as text."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    return {
        f"{PREFIX}experts.{expert}.{part}.weight": torch.randn(shape, generator=generator)
        for expert in range(12)
        for part, shape in shapes.items()
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_of_storing_experts_are_read_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    separate = one_by_one()
    save(tmp_path, separate)
    stored = stored_tensors(tmp_path)
    check_tensors(stored, WANTED, (), "here")
    tensors = read_tensors(stored, dtype, "cpu")
    for expert in range(12):
        gate, up, down = (
            separate[f"{PREFIX}experts.{expert}.{part}_proj.weight"].to(dtype) for part in ("gate", "up", "down")
        )
        assert torch.equal(tensors[GATE_UP][expert], torch.cat((gate, up)))
        assert torch.equal(tensors[DOWN][expert], down)
    fused = {name: tensor.contiguous() for name, tensor in read_tensors(stored, torch.float32, "cpu").items()}
    (tmp_path / "model.safetensors").unlink()
    save(tmp_path, fused)
    again = read_tensors(stored_tensors(tmp_path), dtype, "cpu")
    assert set(again) == set(tensors) == {GATE_UP, DOWN}
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def check(folder: Path) -> None:
    stored = stored_tensors(folder)
    check_tensors(stored, WANTED, (), str(folder))


@pytest.mark.parametrize(
    ("name", "value", "fragments"),
    [
        ("up_proj", None, ["gate_up_proj is [11, 12, 8], its config says [12, 12, 8]", "experts.7.gate_proj.weight"]),
        ("down_proj", torch.zeros(8, 5), ["down_proj is [11, 8, 6]", "not expected", "experts.7.down_proj.weight"]),
        ("gate_proj", torch.zeros(6, 8, dtype=torch.int8), ["fewer than 16 bits", "experts.7.gate_proj.weight is I8"]),
    ],
)
def test_an_expert_that_is_unlike_the_others_is_named(
    tmp_path: Path, name: str, value: torch.Tensor | None, fragments: list[str]
) -> None:
    tensors = one_by_one()
    key = f"{PREFIX}experts.7.{name}.weight"
    del tensors[key]
    save(tmp_path, tensors if value is None else tensors | {key: value})
    (tmp_path / "config.json").write_text("{}")
    with refused(tmp_path, *fragments):
        check(tmp_path)


def test_the_correction_bias_keeps_its_precision(tmp_path: Path) -> None:
    """Scores of many experts lie closer together than bfloat16 can tell apart."""
    name = f"{PREFIX}gate.e_score_correction_bias"
    save(tmp_path, {name: torch.tensor([1.001, 1.002])})
    assert read_tensors(stored_tensors(tmp_path), torch.bfloat16, "cpu")[name].tolist() == pytest.approx([1.001, 1.002])
