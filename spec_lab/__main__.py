"""`python -m spec_lab`: checks the command line, lets Hydra compose one run or a sweep, and runs the jobs.

Exit codes: 0 finished, 1 failed, 2 refused, 130 interrupted. A sweep goes on past a job that is refused or fails, and
ends with the code of its worst job. Composing and refusing never import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what `arguments` (default: those of the process) say and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        from spec_lab.cli.help import help_text

        print(help_text())
        return 0
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from spec_lab.cli.compose import explain
    from spec_lab.cli.job import EXIT_CODES, print_refusal
    from spec_lab.cli.overrides import check_arguments
    from spec_lab.cli.session import Session

    session = Session()
    try:
        session.run(check_arguments(arguments))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        print_refusal(explain(error))
        return EXIT_CODES["refused"]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    session.report()
    return session.exit_code()


if __name__ == "__main__":
    sys.exit(main())
