"""`python -m spec_lab`: checks the command line, lets Hydra compose one run or a sweep, and runs the jobs.

Exit codes: 0 finished, 1 failed, 2 refused, 130 interrupted. A sweep goes on past a job that is refused or fails, and
ends with the code of its worst job. Composing and refusing never import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spec_lab.cli.ending import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what `arguments` (default: those of the process) say and return the exit code."""
    return guarded(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    from spec_lab.cli.overrides import extensions_in

    if "--help" in arguments or "-h" in arguments:
        from spec_lab.cli.help import help_text

        print(help_text(extensions_in(arguments)))
        return 0
    if "--version" in arguments:
        from spec_lab.cli.help import version_text

        print(version_text())
        return 0
    from spec_lab.cli.session import Session

    session = Session()
    session.run(arguments)
    session.report()
    return session.exit_code()


if __name__ == "__main__":
    sys.exit(main())
