"""`python -m spec_lab`: checks the command line, lets Hydra compose one run or a sweep, and runs the jobs.

Exit codes: 0 finished, 1 failed, 2 refused, 130 interrupted. A sweep goes on past a job that is refused or fails, and
ends with the code of its worst job. Composing a run does not import torch, nor does refusing its config.
"""

from __future__ import annotations

from spec_lab.program.interrupts import end_at_signals

if __name__ == "__main__":
    end_at_signals()

import sys
from collections.abc import Sequence
from typing import NoReturn

from spec_lab.cli.follower import Adapt, on_this_rank
from spec_lab.program.ending import guarded, leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process), and return the exit code."""
    typed = sys.argv[1:] if arguments is None else arguments
    return on_this_rank(lambda adapt: guarded(lambda: _run(typed, adapt)))


def command() -> NoReturn:
    """Run the command line of the process, and end the process."""
    leave(main())


def _run(arguments: Sequence[str], adapt: Adapt) -> int:
    from spec_lab.program.overrides import extensions_in

    if "--help" in arguments or "-h" in arguments:
        from spec_lab.program.help import groups_in_help, help_text

        print(help_text(extensions_in(arguments), groups_in_help(arguments)))
        return 0
    if "--version" in arguments:
        from spec_lab.program.help import version_text

        print(version_text())
        return 0
    from spec_lab.cli.completion import complete, is_asked
    from spec_lab.cli.session import Session

    if is_asked(arguments):
        complete(arguments)
        return 0
    session = Session(adapt)
    session.run(arguments)
    session.report()
    return session.exit_code()


if __name__ == "__main__":
    command()
