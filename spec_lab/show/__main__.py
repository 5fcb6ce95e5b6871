"""`python -m spec_lab.show RUN [ID]`: one request of a run, round by round, its tokens coloured by their origin.

prompt pass: the first token; accepted: a draft; relaxed: a draft that only a relaxed rule accepts; bonus: the target's
token after as many drafts as were offered; corrected: the target's token after fewer accepted drafts than that.
Without ID the requests are listed. Without colours (NO_COLOR, no terminal), tokens have marks before them.

  python -m spec_lab.show outputs/RUN
  python -m spec_lab.show outputs/RUN code-3
  python -m spec_lab.show outputs/RUN code-3 --html code-3.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError
from spec_lab.record.reading import read_request_rows, read_summary
from spec_lab.record.sinks import write_asked
from spec_lab.record.wording import number
from spec_lab.report.table import format_table
from spec_lab.show.html import page
from spec_lab.show.rounds import load_request
from spec_lab.show.terminal import format_request, wants_colour


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the request, and return the exit code: 2 if there is no such run or request."""
    return ended(lambda: _show(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.show", description=__doc__, formatter_class=layout)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("id", nargs="?", metavar="ID", help="of a request; without it, the requests are listed")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    options = parser.parse_args(arguments)
    if options.html is not None and options.id is None:
        raise UserError("--html shows one request; name its ID")
    return options


def _show(options: argparse.Namespace) -> int:
    if options.id is None:
        print(_list(options.run))
        return 0
    request = load_request(options.run, options.id)
    if options.html is None:
        print(format_request(request, wants_colour(sys.stdout)))
        return 0
    write_asked("--html", options.html, page(request))
    print(options.html)
    return 0


def _list(folder: Path) -> str:
    read_summary(folder)
    rows = read_request_rows(folder)
    if not rows:
        raise UserError(f"{folder}: no request was recorded")
    body = [
        [
            row["id"],
            row["category"],
            str(len(row["output_ids"])),
            str(len(row["emitted_per_round"])),
            number(sum(row["emitted_per_round"]) / len(row["emitted_per_round"]) if row["emitted_per_round"] else None),
            row["finish_reason"],
        ]
        for row in rows
    ]
    header = ["id", "category", "output tokens", "rounds", "tokens a round", "ended by"]
    return format_table(header, body, left=("id", "category"))


if __name__ == "__main__":
    leave(main)
