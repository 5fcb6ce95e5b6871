"""What `scripts/gpu_check.sh` asks for, with programs in the place of Python, the sanitizer and two GPUs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts/gpu_check.sh"
PYTHON = r"""#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES $*" >> "$NOTES"
case "$TOOL $*" in
  *test_tree_rules*) echo "FAILED tests/test_tree_rules.py::test_a - it broke"; echo "1 failed in 1s"; exit 1;;
  *test_selection*) exec sleep 60;;
  *racecheck*test_kernels_write*) echo "========= Error: Race reported"; echo "3 passed in 1s"; exit 9;;
esac
echo "3 passed in 1s"
"""
SANITIZER = r"""#!/usr/bin/env bash
export TOOL=$2
shift 6
"$@"
"""


def check(folder: Path, *parts: str, limit: int = 20) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run parts of the script, and return how it ended and what Python was asked for."""
    programs = {"python3": PYTHON, "compute-sanitizer": SANITIZER, "nvidia-smi": "#!/bin/sh\necho 0; echo 1\n"}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    notes = folder / "notes"
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "PYTHON")}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder), "NOTES": str(notes)}
    environment |= {"LIMIT": str(limit), "JOBS": "4"}
    done = subprocess.run(["bash", SCRIPT, *parts], env=environment, capture_output=True, text=True)
    return done, notes.read_text().splitlines()


def takes_a_gpu(text: str) -> bool:
    """Tell whether a file's tests run on a GPU where there is one."""
    imported = re.search(r"^from tests\.graph_lab import (\([^)]*\)|.*)", text, re.MULTILINE)
    uses_both = imported is not None and re.search(r"\b(lab|DEVICES)\b", imported[1]) is not None
    return uses_both or "\nfrom tests.kernel_lab import" in text or re.search(r"pytest\.mark\.gpu", text) is not None


@pytest.mark.slow
def test_all_that_take_a_gpu_are_run_and_what_failed_is_named(tmp_path: Path) -> None:
    done, asked = check(tmp_path, "tests", limit=8)
    files = {path.name for path in TESTS.glob("test_*.py") if takes_a_gpu(path.read_text())}
    assert {re.findall(r"test_\w+\.py", line)[0] for line in asked} == files
    assert {line[0] for line in asked} == {"0", "1"}
    graph_modes = [line for line in asked if "test_graph_modes" in line]
    assert len(graph_modes) == 3 and all("-m slow or not slow -k cuda and" in line for line in graph_modes)
    assert done.returncode == 1
    assert "failed: selection tree_rules" in done.stdout or "failed: tree_rules selection" in done.stdout
    assert "it broke" in done.stdout and "rc=124" in done.stdout and "== tests FAILED" in done.stdout


@pytest.mark.slow
def test_every_kernel_is_under_both_tools(tmp_path: Path) -> None:
    done, asked = check(tmp_path, "sanitizer")
    files = [path.name for path in TESTS.glob("test_*.py") if re.match(r"test_(kernels|triton)_", path.name)]
    without = ("compile", "wiring", "triton_backend", "triton_hybrid", "triton_products")
    expected = [name for name in files if not any(part in name for part in without)]
    assert sorted(re.findall(r"test_\w+\.py", line)[0] for line in asked) == sorted(2 * expected)
    assert done.returncode == 1 and "failed: racecheck_kernels_write\n" in done.stdout and "Race" in done.stdout
