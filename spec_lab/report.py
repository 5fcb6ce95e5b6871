"""`python -m spec_lab.report [FOLDER...]`: print the tables of recorded runs, the newest or the named ones."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_lab.record.report import format_definitions, format_run, format_runs
from spec_lab.record.runs import Run, find_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code, 2 where a folder holds no run."""
    parser = argparse.ArgumentParser(prog="python -m spec_lab.report", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument("--last", type=int, default=10, help="without FOLDER, how many of the newest (default: 10)")
    options = parser.parse_args(arguments)
    try:
        runs = find_runs(options.folders or [Path("outputs")])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    runs = runs if options.folders else runs[-options.last :]
    try:
        print(_text(runs), flush=True)
    except BrokenPipeError:  # a pager or `head` that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _text(runs: Sequence[Run]) -> str:
    parts = [format_runs(runs)]
    finished = [run for run in runs if run.summary["status"] == "finished"]
    if finished:
        parts += [f"The newest finished run, {finished[-1].folder}", format_run(finished[-1].summary)]
    return "\n\n".join([*parts, format_definitions()])


if __name__ == "__main__":
    raise SystemExit(main())
