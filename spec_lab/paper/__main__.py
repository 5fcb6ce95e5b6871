"""`python -m spec_lab.paper FILE [OVERRIDES...]`: makes the tables of a paper from a list of drafters and rules.

It runs everything that the tables need. The same command continues a killed study. The study's folder then has
paper/paper.json. It also has each table as LaTeX (booktabs), Markdown and CSV, and figures as PDF and SVG, all made
from that file. The LaTeX, or another --format, is also printed.

  python -m spec_lab.paper conf/paper/pocket.yaml --plan
  python -m spec_lab.paper conf/paper/pocket.yaml
  python -m spec_lab.paper conf/paper/pocket.yaml --as vllm --format markdown
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError, one_line

if TYPE_CHECKING:
    from spec_lab.paper.study import PaperStudy

FORMATS = ("latex", "markdown", "csv")
TOOLS = ("specdec_bench", "vllm", "deepspec", "aiperf")
OUTPUT_DIR = "output_dir="


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the paper given by `arguments` (default: those of the process), and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return ended(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.paper", description=__doc__, formatter_class=layout)
    parser.add_argument("file", type=Path, metavar="FILE", help="a paper's list, such as conf/paper/pocket.yaml")
    said = "for every run, as for python -m spec_lab"
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=said)
    parser.add_argument("--plan", action="store_true", help="print the runs and how long they take, run nothing")
    parser.add_argument("--format", choices=FORMATS, default="latex", help="of what is printed (default: latex)")
    parser.add_argument("--as", dest="tool", choices=TOOLS, help="print acceptance length as this tool counts it")
    parser.add_argument("--fresh", action="store_true", help="begin again if the study has already ended")
    return parser


def _run(arguments: Sequence[str]) -> int:
    from spec_lab.paper.file import read_paper
    from spec_lab.paper.plan import cells_of
    from spec_lab.paper.study import plan_study, preview

    options = _parser().parse_intermixed_args(arguments)
    paper = read_paper(options.file)
    typed = [text for text in options.overrides if not text.startswith(OUTPUT_DIR)]
    places = [text.removeprefix(OUTPUT_DIR) for text in options.overrides if text.startswith(OUTPUT_DIR)]
    study = plan_study(paper, cells_of(paper, typed), Path(places[-1] if places else "outputs"), options.fresh)
    if options.plan:
        lines, refused = preview(study)
        print("\n".join(lines))
        return 2 if refused else 0
    command = shlex.join(["python", "-m", "spec_lab.paper", str(options.file), *typed])
    return _run_and_print(study, options, command)


def _run_and_print(study: PaperStudy, options: argparse.Namespace, command: str) -> int:
    from spec_lab.app.run import display
    from spec_lab.paper.content import JSON_FILE, content_of, printed, read_tables, write_content
    from spec_lab.paper.runs import finished_runs

    with redirect_stdout(sys.stderr):  # so that a redirected output has only the tables
        ended = study.run()
    runs = finished_runs(ended)
    counts = Counter(each.status for each in ended)
    if not runs:
        raise UserError(f"{study.folder}: no run has finished, so there is no table; the lines above give the reasons")
    folder = write_content(study.folder / "paper", content_of(study.paper, runs, command))
    print(printed(folder / JSON_FILE, options.format, options.tool))
    for table in read_tables(folder / JSON_FILE).values():
        for reason in table.left_out:
            print(one_line(f"not printed: {table.name}, {reason}"), file=sys.stderr)
    print(f"{len(ended)} runs: {', '.join(f'{count} {status}' for status, count in counts.items())}", file=sys.stderr)
    print(display(folder.absolute()), file=sys.stderr)
    return 1 if counts["failed"] else 2 if counts["refused"] else 0


if __name__ == "__main__":
    leave(main)
