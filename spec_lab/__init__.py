"""A research lab for speculative decoding: drafter, acceptance, pruning and graph mode as independent factors.

As a library:

    import spec_lab

    config = spec_lab.compose(["drafter=eagle3", "prune=catchup"])
    found = spec_lab.run(config)
    print(found.run["acceptance_length"])

Neither `import spec_lab` nor `compose` imports torch, unless an extension does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError as UserError
from spec_lab.core.version import VERSION

if TYPE_CHECKING:
    from spec_lab.app.compose import Composed
    from spec_lab.record.reading import Found

__version__ = VERSION


def compose(overrides: Sequence[str] = ()) -> Composed:
    """Return the run that `python -m spec_lab OVERRIDES...` would run, as its config and its chosen options.

    Raises:
        UserError: an override is mistyped, does not fit the options chosen, or asks for several runs.
    """
    from spec_lab.app.compose import compose

    return compose(overrides)


def run(config: Composed) -> Found:
    """Run a composed run, record it into its own folder, print its tables, and return the record with the folder.

    Raises:
        UserError: the run is refused, or the machine cannot do it; the message has a remedy.
    """
    from spec_lab.app.run import run_anew

    return run_anew(config)
