"""`python -m spec_lab`: Hydra composes one run or a multirun, and each job is run and recorded in its folder.

Exit codes: 0 finished, 1 failed, 2 refused, 130 interrupted. A multirun goes on past a job that is refused or fails,
and ends with the code of its worst job. Composing and refusing import no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from spec_lab.core.ending import ended, leave
from spec_lab.core.ranks import ranks

SECONDS_FOR_THE_FIRST = 5.0
"""How long another rank waits after an error before it ends, since torchrun then ends the first rank too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process), and return the exit code."""
    return ended(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def command() -> NoReturn:
    """Run the command line of the process, and end the process."""
    leave(main)


def _run(arguments: list[str]) -> int:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from spec_lab.app.compose import VERSION_BASE, conf_folder, explained, extensions_in, prepared
    from spec_lab.config.extensions import conf_folders, load_options
    from spec_lab.config.help import help_text

    if "--help" in arguments or "-h" in arguments:
        folders = [conf_folder(), *conf_folders(load_options(extensions_in(arguments)))]
        print(help_text(folders, [word for word in arguments if "=" not in word and not word.startswith("-")]))
        return 0
    from spec_lab.app.run import job

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises errors, and does not end the process itself
    argv, of_rank = sys.argv, []
    with ExitStack() as stack:
        if rank := ranks().rank:  # all ranks of torchrun compose the same run, and the first prints and records
            of_rank = [f"hydra.run.dir={stack.enter_context(TemporaryDirectory())}"]
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            sys.argv = [argv[0], *prepared(arguments, *of_rank)]
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_folder()), config_name="config")(job)()
            return 0
        except SystemExit as error:  # of Hydra, and of a multirun
            return error.code if isinstance(error.code, int) else 1
        except Exception as error:
            time.sleep(SECONDS_FOR_THE_FIRST if rank else 0)
            if isinstance(error, (HydraException, OmegaConfBaseException)):
                raise explained(error) from error
            raise
        finally:
            sys.argv = argv


if __name__ == "__main__":
    command()
