"""A shell completes options and keys, by Hydra's completion."""

from __future__ import annotations

import pytest

from spec_lab.__main__ import main


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("spec-lab drafter=mtp_", {"drafter=mtp_eagle", "drafter=mtp_vanilla"}),
        ("spec-lab prune.ca", {"prune.catchup="}),
    ],
)
def test_what_a_word_may_become(
    line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert main(["-sc", "query=bash"]) == 0
    assert expected <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["-sc"], ["-sc", "install=tcsh"], ["-sc", "drafter=ngram"]])
def test_what_no_shell_asks_is_refused_in_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "install=bash" in capsys.readouterr().err
