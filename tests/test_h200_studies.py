"""`scripts/h200_studies.sh`: its studies compose, and one runs at a tiny shape on a CPU, with its table."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_tiny_target

SCRIPT = Path(__file__).parents[1] / "scripts" / "h200_studies.sh"
TINY = ["target=hf", "device=cpu", "attention=torch", "kernels=torch", "num_threads=1", "max_new_tokens=4"]


def run_study(folder: Path, study: str, part: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(folder), study],
        env=os.environ | {"PYTHON": sys.executable, "PART": " ".join(part)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "num_jobs"),
    [("graphs", 18), ("drafts", 21), ("contexts", 5)],
)
def test_a_study_composes_at_its_own_shape(study: str, num_jobs: int, tmp_path: Path) -> None:
    said = run_study(tmp_path / "out", study, ["--dry-run"]).stdout
    assert said.count("nothing is refused before the weights are read") == num_jobs


@pytest.mark.slow
def test_a_study_runs_at_a_tiny_shape(tmp_path: Path) -> None:
    """Batch sizes and prompts differ in one table."""
    make_tiny_target(tmp_path / "whole", "llama", num_hidden_layers=7)
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    cells = ["drafter.num_draft_tokens=1", "batch_size=1,2", "workload.prompt_tokens=8,12"]
    part = [*TINY, f"target.path={tmp_path / 'shape'}", "drafter.draft_vocab_size=40", *cells]
    ended = run_study(tmp_path / "out", "drafts", part)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "out" / "drafts.txt").read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("tokens  K  batch"))
    assert [line.split()[:3] for line in lines[head + 2 : head + 6]] == [
        [tokens, "1", batch] for tokens in ("8", "12") for batch in ("1", "2")
    ]


@pytest.mark.slow
def test_outputs_of_prompts_are_measured_at_a_tiny_shape(tmp_path: Path) -> None:
    """Logits are of a chunk's rows, or of one; a cell that is there is not measured again."""
    make_tiny_target(tmp_path / "shape", "llama", num_hidden_layers=7)
    part = ["--tokens=5,20", "--chunks=8", "--drafters=eagle3"]
    part += ["target=hf", "device=cpu", f"target.path={tmp_path / 'shape'}"]
    first, again = (run_study(tmp_path / "out", "prompts", part) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr
    assert first.stderr.count(" s\n") == 4 and " s\n" not in again.stderr
    with (tmp_path / "out" / "prompts" / "passes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    row_bytes = min(int(row["logit_bytes"]) for row in rows)
    found = {(row["tokens"], row["prefill"]): int(row["logit_bytes"]) // row_bytes for row in rows}
    assert found == {("5", "last_row"): 1, ("5", "all_rows"): 5, ("20", "last_row"): 1, ("20", "all_rows"): 8}
    assert (tmp_path / "out" / "prompts.txt").read_text().splitlines()[0].startswith("drafter")


@pytest.mark.slow
def test_rounds_are_timed_behind_prompts_that_nobody_computes(tmp_path: Path) -> None:
    """The catch-up rows are those of the cell; what is there is not measured again, and has its break-even."""
    make_tiny_target(tmp_path / "shape", "llama", num_hidden_layers=7)
    part = ["--prompts=20", "--batches=2", "--drafts=0,2", "--rounds=4", "--passes=1", "target=hf", "device=cpu"]
    part += [f"target.path={tmp_path / 'shape'}", "drafter.draft_vocab_size=40", "attention=torch", "kernels=torch"]
    first, again = (run_study(tmp_path / "out", "pruning", part) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr
    assert first.stderr.count("round ") == 4 and "round " not in again.stderr
    with (tmp_path / "out" / "pruning" / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["K"], row["pruned"], row["catchup_rows"]) for row in rows]
    assert found == [("0", "none", "0"), ("2", "none", "6"), ("2", "post_attention", "2"), ("2", "pre_attention", "2")]
    shown = {tuple(line.split()[2:4]): line.split()[6] for line in again.stdout.splitlines()[2:6]}
    plain, unpruned = float(rows[0]["round"]), float(rows[1]["round"])
    assert shown["0", "none"] == "-" and shown["2", "none"] == f"{unpruned / plain:.3f}"


@pytest.mark.slow
def test_what_was_measured_is_drawn(tmp_path: Path) -> None:
    """A study that is not there has no picture."""
    (tmp_path / "pruning").mkdir()
    header = "tokens,batch,K,pruned,catchup"
    cells = [f"1024,{batch},{drafts},{kind},.3" for batch in (1, 64) for drafts in (0, 3) for kind in ("none", "other")]
    (tmp_path / "pruning" / "rounds.csv").write_text("\n".join([header, *cells]) + "\n")
    script = SCRIPT.parents[1] / "benchmarks" / "study_figures.py"
    command = [sys.executable, str(script), str(tmp_path), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [picture] = tmp_path.glob("*.png")
    assert picture.name == "pruning.png" and said.startswith(str(picture))
