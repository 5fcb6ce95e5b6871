"""Every drafter, pruning and set of references that the command line permits together starts and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.cli.options import read_groups
from spec_lab.measure import runner
from spec_lab.menu.chosen import choose
from spec_lab.menu.refusals.run import refusals
from tests.composed import compose_quickly
from tests.covering import each_value

PRUNINGS = {name: (f"prune={name}",) for name in read_groups()["prune"].options} | {
    "by hand": ("prune.catchup=pre_attention",)
}
REFERENCES = ["[plain,unpruned]", "[]", "[plain]", "[unpruned]"]
TINY = ("debug=smoke", "max_new_tokens=4", "workload.limit=1", "warmup_requests=0", "profile_rounds=0", "kernels=torch")
CASES = each_value(read_groups()["drafter"].options, PRUNINGS, REFERENCES, times=2)
"""`test_lossless.py` crosses drafters and prunings in engines; here a program runs them."""


@pytest.mark.parametrize(("drafter", "pruning", "references"), CASES)
def test_every_drafter_runs_with_prunings_and_references(
    drafter: str, pruning: str, references: str, tmp_path: Path
) -> None:
    config, choices = compose_quickly(f"drafter={drafter}", *PRUNINGS[pruning], f"references={references}", *TINY)
    if refusals(config):
        pytest.skip("is refused")
    summary = runner.run(choose(config), choices, tmp_path)
    expected = set(references.strip("[]").split(",")) - {""}
    assert summary["status"] == "finished" and set(summary["references"]) <= expected
    assert (summary["divergence"] or {}).get("bugs") == 0
