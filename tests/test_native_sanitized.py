"""The C of kernels=native where GCC checks each address that it reads or writes, and what C leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_kernels.native import build

ROOT = Path(__file__).parents[1]
GCC = next((path for path in build.compilers() if "gcc" in Path(path).name), None)
LIBRARIES = ("libasan.so", "libstdc++.so.6")
"""What stands in front of all others in a process with checks: C++ of torch throws, which the checks follow."""

COMPILER = """#!/bin/sh
exec env -u LD_PRELOAD {gcc} -g -fsanitize=address,undefined -fno-sanitize-recover=undefined "$@" -O1
"""
"""The last -O counts: checks stand in front of what -O3 does, which takes ten seconds more of compiling them."""


def library_of(gcc: str, name: str) -> str:
    done = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(GCC is None, reason="needs GCC")
def test_nothing_is_read_or_written_out_of_place(tmp_path: Path) -> None:
    """In the tests of rounds and of products, which look themselves where GCC does not, at tile instructions."""
    assert GCC is not None
    found = [library_of(GCC, name) for name in LIBRARIES]
    if not all(map(os.path.isabs, found)):
        pytest.skip("needs GCC's address sanitizer")
    compiler = tmp_path / "gcc"
    compiler.write_text(COMPILER.format(gcc=GCC))
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CC": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    chosen = [
        "tests/test_native_rounds.py",
        "tests/test_native_products.py",
        "-k",
        "not cache and not compiler and not plain_decoding and not draft_model",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (library,) = (tmp_path / "spec_lab").glob("native-*.so")
    assert b"__asan_init" in library.read_bytes()
