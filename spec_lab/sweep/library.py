"""Imports W&B's search code, the optional package `sweeps`; other modules call `load_library` before they use it."""

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
            import sweeps.config.schema  # in a clone, the folder sweeps/ would be imported as a package

            import sweeps
    except ImportError as error:
        raise UserError(f"spec_lab.sweep needs W&B's search code ({error}); {INSTALL}") from error
    return sweeps


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of the package and its Gaussian process, which the user cannot act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
