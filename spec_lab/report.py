"""`python -m spec_lab.report FOLDER...`: the tables of recorded runs, and everything else that reads them.

Without FOLDER the newest ten runs below outputs/ are shown. A study's runs are shown by the study's own tables, others
beside the first of them (--base), with what a round costs.

  python -m spec_lab.report outputs/pruning-sweep-1a2b3c4d
  python -m spec_lab.report outputs/RUN outputs/OTHER --base 2 --csv runs.csv --figures figures
  python -m spec_lab.report outputs/STUDY --html study.html
  python -m spec_lab.report outputs/STUDY --markdown            the study's tables for a document; also --latex
  python -m spec_lab.report outputs/RUN --request               its requests; with an ID, that one round by round
  python -m spec_lab.report outputs/RUN --rescore acceptance=relaxed_thinking acceptance.topk=3,10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.core.ending import ended
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from spec_lab.record.reading import Found

OUTPUTS = Path("outputs")
NEWEST = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is asked for, and return the exit code: 2 if there is nothing to show."""
    return ended(lambda: print(_asked(_parser().parse_args(arguments))))


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.report", description=__doc__, formatter_class=layout)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument("--base", type=int, default=1, metavar="N", help="the run that others are compared with (1)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the frame: a row a configuration of each run")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="save the figures there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with all of it")
    parser.add_argument("--markdown", action="store_true", help="print the tables for a document")
    parser.add_argument("--latex", action="store_true", help="print the tables for a paper")
    parser.add_argument("--definitions", action="store_true", help="explain every number")
    parser.add_argument("--request", nargs="?", const="", metavar="ID", help="list a run's requests, or show one")
    parser.add_argument("--rescore", nargs="+", metavar="RULE", help="apply other rules to the kept verify rows")
    return parser


def _asked(options: argparse.Namespace) -> str:
    from spec_lab.record.reading import find_runs
    from spec_lab.study.tables import format_definitions

    if options.definitions:
        return format_definitions()
    runs = find_runs(options.folders or OUTPUTS)
    runs = runs if options.folders else runs[-NEWEST:]
    if not 1 <= options.base <= len(runs):
        raise UserError(f"--base={options.base}: the runs are 1 to {len(runs)}")
    if options.request is not None:
        return _request(runs[-1].folder, options.request)
    if options.rescore is not None:
        return _rescored(runs[-1], options.rescore)
    return _report(runs, options)


def _request(folder: Path, request_id: str) -> str:
    from spec_lab.study.rounds import format_request, list_requests, load_request, wants_colour

    if not request_id:
        return list_requests(folder).to_string(index=False)
    return format_request(load_request(folder, request_id), wants_colour(sys.stdout))


def _rescored(found: Found, arguments: Sequence[str]) -> str:
    from spec_lab.app.compose import compose
    from spec_lab.study.rescore import rescore_table, rules_in

    k, extensions = max(1, found.run.num_draft_tokens or 0), ",".join(found.run.config.get("extensions") or [])
    rules = {}
    for rule in rules_in(arguments):
        config = compose([f"extensions=[{extensions}]", f"drafter.num_draft_tokens={k}", *rule]).config
        name = " ".join(text.removeprefix("acceptance=").removeprefix("acceptance.") for text in rule)
        rules[name] = config.acceptance, config.extensions
    return rescore_table(found, rules).text()


def _report(runs: Sequence[Found], options: argparse.Namespace) -> str:
    from spec_lab.study.figures import saved
    from spec_lab.study.frame import frame
    from spec_lab.study.page import page_of
    from spec_lab.study.report import report_of

    report = report_of(runs, options.base)
    written = []
    if options.csv is not None:
        frame(runs).drop(columns="settings").to_csv(options.csv, index=False)
        written.append(options.csv)
    if options.figures is not None:
        written += saved(report.figures, options.figures)
    if options.html is not None:
        options.html.write_text(page_of(report.title, report.under, report.sections, runs, report.definitions))
        written.append(options.html)
    if options.markdown or options.latex:
        tables = report.main_tables
        return "\n\n".join(table.markdown() if options.markdown else table.latex() for table in tables)
    if written:
        return "\n".join(map(str, written))
    return report.text()


if __name__ == "__main__":
    raise SystemExit(main())
