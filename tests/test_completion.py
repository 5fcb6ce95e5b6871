"""A shell completes groups, options, keys and their values."""

from __future__ import annotations

import subprocess

import pytest

from spec_lab.__main__ import main
from spec_lab.cli.completion import candidates


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("spec-lab workload.categ", ["workload.categories="]),
        ("spec-lab drafter=mtp_", ["mtp_eagle", "mtp_vanilla"]),
        ("spec-lab -m drafter=ngram,o", ["ngram,oracle"]),
        ("spec-lab logger.mode=o", ["offline", "online"]),
        ("spec-lab fresh=", ["false", "true"]),
        ("spec-lab --dry", ["--dry-run"]),
        ("spec-lab batch_size=", []),
        ("spec-lab nonsense=x", []),
    ],
)
def test_what_a_word_may_become(line: str, expected: list[str]) -> None:
    assert candidates(line)[: len(expected) or None] == expected


def test_bash_takes_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shell-completion"]) == 0
    script = capsys.readouterr().out
    fake = "spec-lab() { printf 'oracle\\nrandom\\n'; }; COMP_LINE='spec-lab drafter='; COMP_POINT=17; _spec_lab"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{fake}; echo ${{COMPREPLY[@]}}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["oracle", "random"] and not done.stderr
