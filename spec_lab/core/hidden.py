"""Recognises that a file of the working folder has a library's name, so that Python imports it in the library's place.

`python -m` searches the working folder first, and a script searches its own. A `random.py` there breaks every library
that imports `random`.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


def hidden_library(error: BaseException) -> str | None:
    """Return a one-line message if `error` names a module that a file of the working folder hides; else None.

    Such an error arises because the file lacks a name that the library has.
    """
    name = _module_that_lacks_a_name(error)
    file = getattr(sys.modules.get(name), "__file__", None) if name else None
    if name is None or file is None:
        return None
    here, folder = Path.cwd(), Path(file).resolve().parent
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != here]
    if folder not in (here, here / name) or PathFinder.find_spec(name, elsewhere) is None:
        return None
    return f"{file} hides the library {name}; rename it, or type the command in another folder"


def _module_that_lacks_a_name(error: BaseException) -> str | None:
    if isinstance(error, ImportError):
        return error.name and error.name.partition(".")[0]
    lacking = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    return lacking.__name__.partition(".")[0] if isinstance(lacking, ModuleType) else None
