"""Hydra as the tests use it: what the options of conf/ compose to is made once a process, which is most of composing.

A value that is set, a mistake and a folder of a test's own go through Hydra whole; so does all in a process that a test
starts.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from spec_lab.program.options import conf_folder

Key = tuple[Any, ...]
LISTS: dict[Key, defaults_list.DefaultsList] = {}
"""The list of files that some choice of options comes to."""
CONFIGS: dict[int, tuple[list[Any], Callable[[], DictConfig]]] = {}
"""Such a list, by its address, and what makes a copy of what its files come to."""
FILES: dict[tuple[str, str], Callable[[], Any]] = {}
"""What makes a copy of what a file of such a place holds, by the place and the file's path there."""
HYDRAS: dict[Key, Callable[[], DictConfig]] = {}
"""What makes a copy of what Hydra's own files come to, which stand at the front of a list."""
FOREVER = ("pkg://hydra.conf", "pkg://hydra_plugins", "structured://")
"""Where Hydra finds what does not change while tests run, beside the lab's conf/."""


def schemas(folder: Mapping[str, Any]) -> tuple[int, ...]:
    """The addresses of all types that Hydra was told of, which extensions add to."""
    found: tuple[int, ...] = ()
    for name, node in folder.items():
        found += schemas(node) if isinstance(node, dict) else (hash(name), id(node))
    return found


@dataclass
class HydrasOwn:
    """Stands in a list for Hydra's own files."""

    config: DictConfig


def copies_of(made: Any) -> Callable[[], Any]:
    """Return what gives a copy of `made` at each call: by pickle, in a fifth of the time that copying takes."""
    try:
        packed = pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError):  # a type that a test has made inside a function
        return lambda: copy.deepcopy(made)
    return lambda: pickle.loads(packed)


def remember_files(own: str) -> None:
    """Read each file of `own`, the lab's conf/, and of Hydra's once a process."""
    Plugins.instance()  # finds the classes, of which it makes others than one can import
    for scheme in ("file", "pkg"):
        source = SourcesRegistry.instance().resolve(scheme)

        def load_config(self: Any, config_path: str, load_anew: Any = source.load_config) -> Any:
            place = self.full_path()
            if place != own and not place.startswith(FOREVER):
                return load_anew(self, config_path)
            if (place, config_path) not in FILES:
                FILES[place, config_path] = copies_of(load_anew(self, config_path))
            return FILES[place, config_path]()

        source.load_config = load_config  # type: ignore[method-assign]


def install() -> None:
    """Put the memory in place, for good."""
    list_anew = defaults_list.create_defaults_list
    compose_anew = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list
    load_anew = config_loader_impl.ConfigLoaderImpl._load_single_config
    own = f"file://{conf_folder().absolute()}"

    def create_defaults_list(
        repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
    ) -> defaults_list.DefaultsList:
        fresh = defaults_list.Overrides(repo=repo, overrides_list=overrides_list)
        places = tuple(source.full_path() for source in repo.get_sources())
        chosen = repr((fresh.override_choices, fresh.append_group_defaults, fresh.deletions))
        known = schemas(ConfigStore.instance().repo)
        key = (chosen, config_name, prepend_hydra, skip_missing, places, known)
        kept = LISTS.get(key)
        if kept is not None:
            fresh.known_choices = dict(kept.overrides.known_choices)
            return defaults_list.DefaultsList(kept.defaults, kept.defaults_tree, fresh.config_overrides, fresh)
        made = list_anew(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        if all(place == own or place.startswith(FOREVER) for place in places):
            LISTS[key] = made
        return made

    def compose(self: Any, defaults: list[Any], repo: Any) -> DictConfig:
        if id(defaults) not in CONFIGS:
            if all(defaults is not kept.defaults for kept in LISTS.values()):
                return compose_anew(self, defaults, repo)
            hydras = list(takewhile(lambda default: default.config_path.startswith("hydra/"), defaults))
            key = tuple((default.config_path, default.package) for default in hydras)
            if key not in HYDRAS:
                HYDRAS[key] = copies_of(compose_anew(self, hydras, repo))
            made = compose_anew(self, [HydrasOwn(HYDRAS[key]()), *defaults[len(hydras) :]], repo)
            CONFIGS[id(defaults)] = defaults, copies_of(made)
        return CONFIGS[id(defaults)][1]()

    def load_single(self: Any, default: Any, repo: Any) -> Any:
        return default if isinstance(default, HydrasOwn) else load_anew(self, default, repo)

    copy_anew = DictConfig.__deepcopy__

    def copy_of(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
        parent, self.__dict__["_parent"] = self.__dict__["_parent"], None
        try:
            made: DictConfig = pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))
        except (pickle.PicklingError, AttributeError):
            made = copy_anew(self, memo)
        finally:
            self.__dict__["_parent"] = parent
        made.__dict__["_parent"] = parent
        return made

    DictConfig.__deepcopy__ = copy_of  # type: ignore[method-assign]
    map_anew = defaults_list._create_interpolation_map

    def map_where_read(overrides: Any, entries: list[Any], self_added: bool) -> DictConfig | None:
        is_read = any(entry.is_interpolation() for entry in entries)
        return map_anew(overrides, entries, self_added) if is_read else None

    # Hydra makes it for each file, and reads it where an entry names another's choice.
    defaults_list._create_interpolation_map = map_where_read  # type: ignore[assignment]
    # Hydra copies the places where it looks each time, and with one of them all types that it was told of.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    remember_files(own)
    config_loader_impl.create_defaults_list = create_defaults_list
    config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list = compose  # type: ignore[method-assign]
    config_loader_impl.ConfigLoaderImpl._load_single_config = load_single  # type: ignore[method-assign]
