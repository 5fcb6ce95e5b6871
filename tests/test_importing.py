"""Every program answers a signal while it still imports, whichever module that is at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spec_lab

ROOT = Path(spec_lab.__file__).parent
PROGRAMS = sorted(".".join(file.parent.relative_to(ROOT.parent).parts) for file in ROOT.rglob("__main__.py"))
STRUCK = """
import os, runpy, signal, sys

FIRST = {"spec_lab.program", "spec_lab.program.interrupts", "spec_lab.core", "spec_lab.core.errors"}
FIRST |= {"spec_lab.core.version", "spec_lab.core.ranks"}

class Strike:
    seen = 0

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in STANDARD or PROGRAM.startswith(name) or name in FIRST or name.endswith("__main__"):
            return None
        self.seen += 1
        if self.seen % 21 != 1 and top != name:
            return None
        number = (signal.SIGINT, signal.SIGTERM)[self.seen % 2]
        child = os.fork()
        if child == 0:
            sys.meta_path.remove(self)
            signal.raise_signal(number)
            return None
        print(name, number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=report, flush=True)
        return None

STANDARD = {*sys.stdlib_module_names, "org"}  # copy asks for the latter, for Jython
PROGRAM = sys.argv[1]
report = os.fdopen(int(sys.argv[2]), "w")
sys.argv[1:] = ["--help"]
sys.meta_path.insert(0, Strike())
runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_signal_within_an_import_ends_every_program_in_a_line(program: str) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", STRUCK, program, str(write)]
    with subprocess.Popen(
        command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(write)
        with os.fdopen(read) as report:
            struck = [line.split() for line in report]
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert struck
    assert [entry for entry in struck if entry[2] != "130"] == []
    lines = errors.splitlines()
    assert len(lines) == len(struck)
    assert all(line.startswith("interrupted") for line in lines), errors
