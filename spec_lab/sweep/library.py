"""The one door to W&B's search code, the package `sweeps`, which is an optional extra."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from spec_lab.core.errors import UserError

INSTALL = "pip install -c constraints.txt -e '.[sweep]'"


def load_library() -> ModuleType:
    """Import the package `sweeps`.

    Raises:
        UserError: it is not installed.
    """
    try:
        with quiet():
            import sweeps.config.schema  # in a clone the folder sweeps/ of its sweep files would do as a package too

            import sweeps
    except ImportError as error:
        raise UserError(f"spec_lab.sweep needs W&B's search code ({error}); {INSTALL}") from error
    return sweeps


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what the package and its Gaussian process say about themselves: nobody here can act on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
