"""`python -m spec_lab`: Hydra composes one run or a multirun, and each job is run and recorded in its folder.

Exit codes: 0 finished, 1 failed, 2 refused, 130 interrupted. A multirun goes on past a job that is refused or fails,
and ends with the code of its worst job. Composing and refusing import no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from spec_lab.core.ending import ended, leave
from spec_lab.core.ranks import ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process), and return the exit code.

    Hydra and a multirun that did not finish raise SystemExit.
    """
    return ended(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


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
    argv = sys.argv
    with TemporaryDirectory() as scratch:
        # All ranks of torchrun compose the same run, and the first prints and records.
        of_rank = [f"hydra.run.dir={scratch}"] if ranks().rank else []
        try:
            sys.argv = [argv[0], *prepared(arguments, *of_rank)]
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_folder()), config_name="config")(job)()
            return 0
        except (HydraException, OmegaConfBaseException) as error:
            raise explained(error) from error
        finally:
            sys.argv = argv


if __name__ == "__main__":
    leave(main)
