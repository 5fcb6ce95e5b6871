"""The tables of docs/families.md are what the code says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.checkpoints.expert_sizes import ExpertSizes, RouterScores
from spec_lab.checkpoints.families.deepseek import refuse_deepseek_v2
from spec_lab.checkpoints.families.table import READERS
from spec_lab.checkpoints.latent_sizes import LatentSizes
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.quantization import problem_of_fp8
from spec_lab.errors import UserError
from spec_lab.models.tensor_parallel import TensorParallel

PAGE = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
FULL = LayerPlan(4, 2, 16, RopeConfig(1e4, "none"), 32)
QWEN = DeltaNetSizes(16, 32, 128, 128, 4)
PLANS = {
    "full and sliding attention": FULL,
    "experts": replace(FULL, experts=ExpertSizes(4, 2, 8, RouterScores.SOFTMAX)),
    "latent attention": replace(FULL, latent=LatentSizes(8, 8, 4, 8, None, 1.0)),
    "a gated delta net": replace(FULL, delta_net=QWEN),
}


def cells(first: str) -> list[str]:
    """The cells of the row that begins with `first`."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_architecture_that_runs_is_in_the_table() -> None:
    named = re.findall(r"`(\w+For\w+)`", PAGE)
    assert sorted(named) == sorted(name for name, reader in READERS.items() if reader is not refuse_deepseek_v2)


@pytest.mark.parametrize("kind", PLANS)
def test_what_is_refused_is_refused(kind: str) -> None:
    _, tree, ranks, narrow, draft_model = cells(kind)
    plan = PLANS[kind]
    config = ModelConfig("any", 8, 8, 1e-6, 8, False, (FULL, plan), (), None, "float32")
    assert (tree == "refused") == (draft_model == "refused") == config.keeps_states
    assert (narrow == "refused") == (problem_of_fp8(config) is not None)
    try:
        TensorParallel(0, 2, None).share(plan)  # type: ignore[arg-type]
        found = "runs"
    except UserError:
        found = "refused"
    assert ranks == found


@pytest.mark.parametrize(
    ("row", "net", "num_rows"),
    [
        ("Qwen3.5-9B, K=1", QWEN, 2),
        ("Qwen3.5-9B", QWEN, 4),
        ("Qwen3.5-9B, K=7", QWEN, 8),
        ("Qwen3.5-35B-A3B", QWEN, 4),
        ("Qwen3.5-27B", replace(QWEN, num_value_heads=48), 4),
    ],
)
def test_bytes_of_a_slot(row: str, net: DeltaNetSizes, num_rows: int) -> None:
    num_layers, checkpoints, replay = (int(cell.replace(",", "")) for cell in cells(row)[1:])
    assert checkpoints == num_layers * net.checkpoint_bytes(num_rows, item_size=2)
    assert replay == num_layers * net.replay_bytes(num_rows, item_size=2)
