"""The compiled C of kernels=native between runs: it is compiled once, and again where what is kept does not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_kernels.native import build
from spec_kernels.native.build import library
from spec_kernels.native.compiler import FLAGS, HERE, MORE_FLAGS, BuildError, compilers, key

REAL = next(iter(compilers()), "")
pytestmark = pytest.mark.skipif(not REAL, reason="needs a C compiler")

COUNTING = """#!/bin/sh
case $1 in --version) exec {real} --version; esac
echo >> {log}
exec {real} "$@" -O0
"""
LOAD = "from spec_kernels.native.build import library; library().native_has_tiles()"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Count compilations, in lines, of an empty cache's folder."""
    script, log = tmp_path / "compiler", tmp_path / "log"
    script.write_text(COUNTING.format(real=REAL, log=log))
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def in_a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LOAD])


def num_compilations(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_it_is_compiled_once_and_again_where_it_is_damaged(log: Path) -> None:
    for expected in (1, 1):
        assert in_a_process().wait() == 0
        assert num_compilations(log) == expected
    (kept,) = (log.parent / "cache" / "spec_lab").iterdir()
    kept.write_bytes(b"")
    assert in_a_process().wait() == 0
    assert num_compilations(log) == 2


def test_processes_that_compile_at_once(log: Path) -> None:
    started = [in_a_process() for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert len(list((log.parent / "cache" / "spec_lab").iterdir())) == 1


def test_a_cache_that_cannot_be_made_is_done_without(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = log.parent / "cache"
    blocked.write_text("")
    assert in_a_process().wait() == 0
    assert num_compilations(log) == 1 and blocked.read_text() == ""


def test_other_flags_are_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(REAL)
    monkeypatch.setenv(MORE_FLAGS, "-O1")
    assert key(REAL) != before


def test_a_compiler_that_fails_is_named_and_the_next_may_do(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    wrong = log.parent / "wrong"
    wrong.write_text("#!/bin/sh\necho 'native.c:1: error: no' >&2; exit 1\n")
    wrong.chmod(0o755)
    monkeypatch.setattr(build, "compilers", lambda: [str(wrong)])
    with pytest.raises(BuildError, match=r"wrong: it does not compile native.c .*error: no"):
        library.__wrapped__()
    monkeypatch.setattr(build, "compilers", lambda: [str(wrong), os.environ["CC"]])
    assert library.__wrapped__().native_has_tiles() in (0, 1)


def test_the_c_is_compiled_without_a_warning(tmp_path: Path) -> None:
    command = [REAL, *FLAGS, "-Wall", "-Wextra", "-Werror", str(HERE / "native.c"), "-o", str(tmp_path / "native.so")]
    subprocess.run(command, check=True)
