"""Modules outside this package that add options: named by `extensions=[MODULE]`, or installed with an entry point.

Importing a module registers its options. A package may have a folder `conf/` with their YAML files; Hydra then
searches that folder too.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

ENTRY_POINTS = "spec_lab.extensions"
"""The group under which an installed package names its module."""


def load_options(extensions: Iterable[str] = ()) -> list[ModuleType]:
    """Register the lab's own options, and those of installed and named extensions; return the extensions' modules."""
    import_module("spec_lab.options")
    installed = [point.value for point in metadata.entry_points(group=ENTRY_POINTS)]
    return [import_module(name) for name in dict.fromkeys([*installed, *extensions])]


def conf_folders(extensions: Iterable[ModuleType]) -> list[Path]:
    """Return the folders `conf/` of those extensions that are packages and have one."""
    folders = [Path(folder) / "conf" for module in extensions for folder in getattr(module, "__path__", [])]
    return [folder.resolve() for folder in folders if folder.is_dir()]
