"""Output goes on into nothing when nobody reads it, and is never lost to an encoding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys
from spec_lab.program.ending import guarded

def run():
    for number in range(20000):
        print(f"Prüfung {number}", file=getattr(sys, STREAM))
    return 0

sys.exit(guarded(run))
"""


def command_printing_to(stream: str) -> str:
    return PRINTS.replace("STREAM", repr(stream))


@pytest.mark.parametrize(("stream", "redirect"), [("stdout", ""), ("stderr", "2>&1 >/dev/null")])
def test_a_closed_pipe_does_not_end_a_program(stream: str, redirect: str, empty_folder: Path) -> None:
    (empty_folder / "p.py").write_text(command_printing_to(stream))
    line = f"{sys.executable} p.py {redirect} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_leads_nowhere(closed: str, empty_folder: Path) -> None:
    """What C writes to standard error does not go into the file that is opened next."""
    (empty_folder / "p.py").write_text(
        "import os, sys\nfrom spec_lab.program.ending import guarded\n"
        "def run():\n    print('a', sys.stdout.isatty(), sys.stderr.isatty())\n    print('b', file=sys.stderr)\n"
        "    with open('record', 'w'):\n        os.write(1, b'c')\n        os.write(2, b'c')\n"
        "sys.exit(guarded(run))\n"
    )
    done = subprocess.run(["bash", "-c", f"{sys.executable} p.py {closed}"])
    assert done.returncode == 0 and (empty_folder / "record").read_bytes() == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_has_not_is_written_as_its_number(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", command_printing_to("stdout")],
        capture_output=True,
        env={"PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[7] == "Prüfung 7".encode(encoding, errors="backslashreplace")


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    code = [sys.executable, "-c", command_printing_to("stdout")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(code, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "failed: standard output: No space left on device\n")


def test_what_took_the_error_of_a_full_disk_does_not_hide_it() -> None:
    """As Hydra does where it flushes logs at the end of a job."""
    hidden = command_printing_to("stdout").replace(
        "    return 0", "    with suppress(OSError):\n        sys.stdout.flush()"
    )
    few = "from contextlib import suppress\n" + hidden.replace("20000", "3")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", few], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "failed: standard output: No space left on device\n")


def test_a_program_without_output_runs() -> None:
    line = f"{sys.executable} -c '{command_printing_to('stderr')}' >&- 2>&-"
    assert subprocess.run(["bash", "-c", line.replace("'stderr'", '"stderr"')]).returncode == 0
