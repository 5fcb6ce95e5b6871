"""`python -m spec_lab.sweep FILE [OVERRIDES...]`: run a W&B sweep file without W&B's server, on W&B's own search code.

The same command continues a killed sweep, unless code, config files or packages have changed since. Runs that
finished or were refused before are shown and not repeated. Exit codes are those of `python -m spec_lab`.
"""

from __future__ import annotations

from spec_lab.program.interrupts import end_at_signals

if __name__ == "__main__":
    end_at_signals()

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.program.ending import LineParser, guarded, leave

if TYPE_CHECKING:
    from spec_lab.sweep.session import Sweep

LARGEST_SEED = 2**63 - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of the process), and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(arguments), interrupted="interrupted; the same command repeats no run that has ended")


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(
        prog="python -m spec_lab.sweep",
        description="Run a W&B sweep file without W&B's server. The same command continues a killed sweep, unless "
        "code, config files or packages have changed since.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a W&B sweep file, such as sweeps/drafter_grid.yaml")
    said = "for every run, as for python -m spec_lab"
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=said)
    parser.add_argument("--count", type=_positive, help="largest number of runs; the file's run_cap applies too")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of the search (default: 0)")
    parser.add_argument("--fresh", action="store_true", help="begin a new sweep if an earlier one has ended")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the first runs, and which of them would be refused; run nothing"
    )
    return parser


def _run(arguments: Sequence[str]) -> int:
    from spec_lab.sweep.plan import plan_sweep, preview

    options = _parser().parse_intermixed_args(arguments)
    sweep = plan_sweep(options.file, options.overrides, options.count, options.seed, options.fresh)
    return preview(sweep) if options.dry_run else _run_and_show(sweep)


def _run_and_show(sweep: Sweep) -> int:
    from spec_lab.cli.job import worst_exit_code
    from spec_lab.program.folder import display
    from spec_lab.sweep.table import format_trials

    trials = sweep.run()
    counts = Counter(trial.outcome.status for trial in trials)
    print(format_trials(sweep.file, trials))
    print(f"{len(trials)} runs: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    print(display(sweep.folder.absolute()))
    return worst_exit_code(counts)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: use 1 or more")
    return value


def _seed(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text}: use 0 to {LARGEST_SEED}")
    return value


if __name__ == "__main__":
    leave(main())
