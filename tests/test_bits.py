"""`benchmarks/bits.py` sees a changed bit, and a hook that no longer fires."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench_modules import imported

CHAIN = "device=cpu drafter=eagle3 graph=round"
SEEN = {
    **{part: ["a", "b"] for part in ("tokens", "caches", "nodes", "first logits", "drafts", "draft states")},
    "logits": ["a", "b", "c", "d"],
}


@pytest.fixture
def bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("bits", monkeypatch) as module:
        yield module


@pytest.fixture
def old() -> dict[str, Any]:
    """A record of one run and one kernel."""
    runs = {CHAIN: copy.deepcopy(SEEN), "kernel _rank": {"ptx": ["form hash"]}}
    known = {"source": "here", "gpu": False, "only": "", "machine": {"CPU": "EPYC"}, "ms": {}, "trouble": []}
    return known | {"runs": runs}


def compared(bits: ModuleType, folder: Path, old: dict[str, Any], new: dict[str, Any]) -> int:
    files = [folder / "old.json", folder / "new.json"]
    for file, made in zip(files, (old, new), strict=True):
        file.write_text(json.dumps(made))
    return bits.main(["compare", *map(str, files)])


def test_what_is_the_same_is_the_same(bits: ModuleType, tmp_path: Path, old: dict[str, Any]) -> None:
    assert compared(bits, tmp_path, old, copy.deepcopy(old)) == 0


@pytest.mark.parametrize(
    ("line", "part", "hashes", "said"),
    [
        (CHAIN, "logits", ["a", "b", "x", "d"], "logits from 3 of 4"),
        (CHAIN, "tokens", ["a"], "tokens"),
        (CHAIN, "draft logits", ["a"], "draft logits"),
        ("kernel _rank", "ptx", ["form other"], "_rank"),
    ],
)
def test_a_changed_hash_is_told_with_its_place(
    bits: ModuleType,
    tmp_path: Path,
    old: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    line: str,
    part: str,
    hashes: list[str],
    said: str,
) -> None:
    new = copy.deepcopy(old)
    new["runs"][line][part] = hashes
    assert compared(bits, tmp_path, old, new) == 1
    assert said in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("part", SEEN)
def test_a_hook_that_did_not_fire_is_no_equality(
    bits: ModuleType, tmp_path: Path, old: dict[str, Any], capsys: pytest.CaptureFixture[str], part: str
) -> None:
    """Even where it fired in neither record."""
    old["runs"][CHAIN][part] = []
    assert compared(bits, tmp_path, old, copy.deepcopy(old)) == 2
    assert part in capsys.readouterr().err


def test_everything_is_seen_of_a_replayed_run(
    bits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names that the program knows of the lab lead somewhere, and a second look sees what the first did, but for
    what was changed in between."""
    file = tmp_path / "record.json"
    assert bits.main(["record", str(file), "--only", "drafter=mtp_vanilla graph=round"]) == 0
    made = json.loads(file.read_text())
    (seen,) = made["runs"].values()
    count = len(seen["logits"])
    assert count > 2, "of every round, not of its capture"
    seen["logits"][-1] = "other"
    file.write_text(json.dumps(made))
    capsys.readouterr()
    assert bits.main(["compare", str(file)]) == 1
    told = capsys.readouterr().out.splitlines()[0]
    assert f"logits from {count} of {count}" in told and ";" not in told
