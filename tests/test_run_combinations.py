"""Every drafter, pruning and set of references that the command line permits together starts and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.cli.compose import compose_run
from spec_lab.cli.options import read_groups
from spec_lab.measure import runner
from spec_lab.menu.chosen import choose
from spec_lab.menu.refusals.run import refusals

PRUNINGS = {name: (f"prune={name}",) for name in read_groups()["prune"].options} | {
    "by hand": ("prune.catchup=pre_attention",)
}
REFERENCES = ["[]", "[plain]", "[unpruned]", "[plain,unpruned]"]
TINY = ("debug=smoke", "max_new_tokens=4", "workload.limit=1", "warmup_requests=0", "profile_rounds=0")


def run_all_references(drafter: str, pruning: str, folder: Path) -> None:
    for references in REFERENCES:
        overrides = [f"drafter={drafter}", *PRUNINGS[pruning], f"references={references}", *TINY]
        config, choices = compose_run(overrides)
        if refusals(config):
            continue
        summary = runner.run(choose(config), choices, folder / references)
        expected = set(references.strip("[]").split(",")) - {""}
        assert summary["status"] == "finished" and set(summary["references"]) <= expected
        assert (summary["divergence"] or {}).get("bugs") == 0


@pytest.mark.slow
@pytest.mark.parametrize("pruning", PRUNINGS)
@pytest.mark.parametrize("drafter", read_groups()["drafter"].options)
def test_every_drafter_runs_with_every_pruning_and_reference(drafter: str, pruning: str, tmp_path: Path) -> None:
    run_all_references(drafter, pruning, tmp_path)
