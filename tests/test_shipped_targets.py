"""Every factor of the lab on every shipped target of another family: it gives the tokens of plain decoding, or it is
refused in a line. The table of `docs/families.md` says which, and is walked cell by cell."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from spec_lab.assembly.drafters.trained import SHIPPED, ZOO
from spec_lab.assembly.engine import build_engine
from spec_lab.assembly.heads import load_drafter
from spec_lab.assembly.models import engine_limits, load_models, target_folder, thinking_markers
from spec_lab.assembly.workloads_loader import load_requests
from spec_lab.cli.compose import compose_run
from spec_lab.compatibility.run import refuse
from spec_lab.config import RunConfig
from spec_lab.errors import UserError
from spec_lab.measure.runner import run
from spec_lab.workloads.tokenizer import TargetTokenizer

PAGE = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
FIRST_CELL = "| what is chosen |"
CHEAP = ["max_new_tokens=6", "workload.limit=2", "batch_size=2", "device=cpu", "num_threads=1"]
NOT_GREEDY = ("acceptance=rejection", "acceptance=synthetic", "acceptance=relaxed_thinking", "dtype=bfloat16")


def table() -> tuple[list[str], list[tuple[str, str, str]]]:
    """The targets of the table, and of each cell the overrides, the target and what stands there."""
    lines = PAGE[PAGE.index(FIRST_CELL) :].split("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines)
    return header[1:], [
        (row[0], target, cell) for row in rows for target, cell in zip(header[1:], row[1:], strict=True)
    ]


TARGETS, CELLS = table()


def compose(target: str, overrides: str) -> tuple[RunConfig, dict[str, str]]:
    shipped = [] if overrides.startswith("drafter=") else [f"drafter={SHIPPED[target][0]}"]
    return compose_run([f"target={target}", *shipped, *CHEAP, *overrides.split()])


def decode(config: RunConfig) -> dict[str, list[int]]:
    tokenizer = TargetTokenizer(target_folder(config))
    requests = load_requests(config, tokenizer)
    limits = engine_limits(config, requests, config.drafter.num_draft_tokens)
    models = load_models(config, limits.max_seq_len, thinking_markers(tokenizer))
    engine = build_engine(config, models, load_drafter(config, models), limits)
    return {record.request_id: record.output_ids for record in engine.generate(requests).requests}


@cache
def plain(target: str) -> dict[str, list[int]]:
    return decode(compose(target, "drafter=none")[0])


def test_the_table_has_all_shipped_targets_of_other_families() -> None:
    assert [target for target in SHIPPED if target != "pocket"] == TARGETS
    for target, drafters in SHIPPED.items():
        assert (ZOO / target / "model.safetensors").is_file()
        assert all((ZOO / f"{target}-{drafter}" / "model.safetensors").is_file() for drafter in drafters)


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "target", "cell"), CELLS)
def test_a_cell_is_what_happens(overrides: str, target: str, cell: str, tmp_path: Path) -> None:
    """Oracle drafts come from the runner, the others from an engine alone."""
    config, choices = compose(target, overrides)
    if cell != "runs":
        with pytest.raises(UserError) as refused:
            refuse(config)
            decode(config)
        assert cell.startswith("refused: ") and cell.removeprefix("refused: ") in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    refuse(config)
    if overrides == "drafter=oracle":
        divergence = run(config, choices, tmp_path)["divergence"]
        assert divergence is not None and divergence["bugs"] == 0
        return
    outputs = decode(config)
    assert all(len(tokens) == 6 for tokens in outputs.values())
    if not overrides.startswith(NOT_GREEDY):
        assert outputs == plain(target)
