"""Modules outside this package that add options: named by `extensions=[MODULE]`, or installed with an entry point.

A module has a function `register(registry)`. A package may have a folder `conf/` with the YAML files of its options and
experiments; Hydra then searches that folder too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType

from spec_lab.core.errors import UserError, describe_error
from spec_lab.record.provenance import git_revision

ENTRY_POINTS = "spec_lab.extensions"
"""The group under which an installed package names its module."""
ENDINGS = (Exception, SystemExit, GeneratorExit)


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions that have each top-level module; all their lists of files are read for it."""
    return metadata.packages_distributions()


@dataclass(frozen=True, slots=True)
class Extension:
    """A module that adds options."""

    name: str
    module: ModuleType

    @property
    def conf(self) -> Path | None:
        """Return the package's `conf/` folder; None if there is none."""
        folders = [Path(folder) / "conf" for folder in getattr(self.module, "__path__", [])]
        return next((folder.resolve() for folder in folders if folder.is_dir()), None)

    def origin(self) -> dict[str, str | None]:
        """Return its version, and the git revision if its file is tracked in a checkout."""
        file = None if self.module.__file__ is None else Path(self.module.__file__).resolve()
        revision = None if file is None else git_revision(file.parent, file.name)
        return {"version": self._version(), "revision": revision}

    def _version(self) -> str | None:
        """Return the version of the distribution that contains it, else its `__version__`."""
        top = self.name.partition(".")[0]
        for distribution in _distributions().get(top, ()):
            return metadata.version(distribution)
        version = getattr(self.module, "__version__", None)
        return None if version is None else str(version)

    def register(self, registry: object) -> None:
        """Call the module's `register` with the registry.

        Raises:
            UserError: it has no such function, or the function is async, fails, returns something, or changes the
                working folder.
        """
        register = getattr(self.module, "register", None)
        if not callable(register):
            raise UserError(f"extensions: {self.name} has no function register(registry); docs/extend.md shows one")
        if iscoroutinefunction(register):
            raise UserError(f"extensions: {self.name}.register is async, but is not awaited; write def register")
        try:
            returned = register(registry)
        except UserError:
            raise
        except ENDINGS as error:
            raise UserError(f"extensions: {self.name}.register fails ({describe_error(error)}); correct it") from error
        if returned is not None:
            said = f"extensions: {self.name}.register returns {type(returned).__name__}, which nobody reads"
            raise UserError(f"{said}; add rows with registry.add(ROW)")


def find_extensions(names: Iterable[str]) -> list[Extension]:
    """Find installed extensions, then the modules named, each once.

    Raises:
        UserError: one cannot be imported.
    """
    installed = [point.value for point in metadata.entry_points(group=ENTRY_POINTS)]
    return [find_extension(name) for name in dict.fromkeys([*installed, *names])]


def find_extension(name: str) -> Extension:
    """Import the module of an extension; UserError if it cannot be imported."""
    return Extension(name, _import(name))


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"extensions: {name!r} is not the name of a module; write it as an import does, such as "
            "extensions=[my_lab], and put the folder that holds it on PYTHONPATH"
        )
    try:
        return import_module(name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            said = f"extensions: there is no module {name}"
            if name.endswith(".py"):
                raise UserError(f"{said}; name it without .py, as in extensions=[{name[:-3]}]") from error
            raise UserError(f"{said}; install it, or put the folder that holds it on PYTHONPATH") from error
        raise _broken(name, error) from error
    except ENDINGS as error:
        raise _broken(name, error) from error


def _broken(name: str, error: BaseException) -> UserError:
    remedy = f'python -c "import {name}" shows where'
    if isinstance(error, SystemExit):  # Python prints no traceback for it
        remedy = "it must not end the process; correct it"
    return UserError(f"extensions: {name} cannot be imported ({describe_error(error)}); {remedy}")
