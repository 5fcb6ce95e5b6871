"""A research lab for speculative decoding: drafter, acceptance, pruning and graph mode as independent factors.

As a library:

    import spec_lab

    config = spec_lab.compose(["drafter=eagle3", "prune=catchup"])
    result = spec_lab.run(config)
    print(result)

Neither `import spec_lab` nor `compose` imports torch, unless an extension does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError as UserError
from spec_lab.core.version import VERSION

if TYPE_CHECKING:
    import pandas as pd

    from spec_lab.app.compose import Composed
    from spec_lab.app.notebook import Result
    from spec_lab.doctor.findings import Finding

__version__ = VERSION


def compose(overrides: Sequence[str] = ()) -> Composed:
    """Return the run that `python -m spec_lab OVERRIDES...` would run, as its config and its chosen options.

    Raises:
        UserError: an override is mistyped, does not fit the options chosen, or asks for several runs.
    """
    from spec_lab.app import compose

    return compose.compose(overrides)


def run(config: Composed) -> Result:
    """Run a composed run, record it into its own folder, and return the result.

    Raises:
        UserError: the run is refused, or the machine cannot do it; the message has a remedy.
    """
    from spec_lab.app import notebook

    return notebook.run(config)


def load_frame(folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> pd.DataFrame:
    """Return a row for each part of each run in and below the folders, as `spec_lab.study.frame` describes.

    Raises:
        UserError: a folder is missing or has no run.
    """
    from spec_lab.study import frame

    return frame.load_frame(folders)  # type: ignore[arg-type]


def examine(config: Composed) -> list[Finding]:
    """Return what `python -m spec_lab.doctor` finds about a run that was composed; nothing is written.

    Raises:
        UserError: the run is refused, or the doctor cannot examine it.
    """
    from spec_lab.config.checks import admit
    from spec_lab.doctor.examine import examine
    from spec_lab.doctor.subject import load_subject

    return examine(load_subject(admit(config.config)))
