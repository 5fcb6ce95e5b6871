"""Hydra as the tests use it: what the options of conf/ compose to is made once a process, which is most of composing.

A value that is set, a mistake and a folder of a test's own go through Hydra whole; so does all in a process that a test
starts.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, flag_override
from omegaconf.errors import OmegaConfBaseException

from spec_lab.program.options import conf_folder

Key = tuple[Any, ...]
OWN = f"file://{conf_folder().absolute()}"
LISTS: dict[Key, defaults_list.DefaultsList] = {}
"""The list of files that some choice of options comes to."""
CONFIGS: dict[int, tuple[list[Any], Callable[[], DictConfig]]] = {}
"""Such a list, by its address, and what makes a copy of what its files come to."""
FILES: dict[Key, tuple[Any, Callable[[], Any]]] = {}
"""The type that a file stands for, if any, and what makes a copy of what it holds, by its place and its path there."""
FRONTS: dict[Key, Callable[[], DictConfig]] = {}
"""What makes a copy of what Hydra's own files and the schema of a run come to, which stand at the front of a list."""
PARTS: dict[Key, tuple[Any, Callable[[], DictConfig]]] = {}
"""The types that an option's files name, and what makes a copy of what those files come to behind such a front."""
HYDRAS_OWN: list[tuple[Any, str, Any]] = []
"""Where something stands that was Hydra's or OmegaConf's own, under which name, and that."""
FOREVER = ("pkg://hydra.conf", "pkg://hydra_plugins", "structured://")
"""Where Hydra finds what does not change while tests run, beside the lab's conf/."""


def put(owner: Any, name: str, ours: Any) -> None:
    """Put `ours` in the place of what is not ours."""
    HYDRAS_OWN.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, ours)


def schemas(folder: Mapping[str, Any]) -> tuple[int, ...]:
    """The addresses of all types that Hydra was told of, which extensions add to."""
    found: tuple[int, ...] = ()
    for name, node in folder.items():
        found += schemas(node) if isinstance(node, dict) else (hash(name), id(node))
    return found


@dataclass
class Merged:
    """Stands in a list for the files before it."""

    config: DictConfig


def copies_of(made: Any) -> Callable[[], Any]:
    """Return what gives a copy of `made` at each call: by pickle, in a fifth of the time that copying takes."""
    try:
        packed = pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError):  # a type that a test has made inside a function
        return lambda: copy.deepcopy(made)
    return lambda: pickle.loads(packed)


def with_parts(defaults: list[Any], repo: Any, composed: Callable[[list[Any]], DictConfig]) -> list[Any]:
    """The list with one entry for Hydra's own files, the schema of a run and each option's files, which set one key of
    the run, whatever the others are. Files of a test's own folder stay as they are."""
    others = [source for source in repo.get_sources() if not source.full_path().startswith((OWN, *FOREVER))]
    paths = [each.config_path for each in defaults]
    end = paths.index("schema/run") + 1 if "schema/run" in paths else 0
    options = list(takewhile(lambda each: each.package and "." not in each.package, defaults[end:]))
    files: dict[str, list[Any]] = {}
    for each in options:
        files.setdefault(each.package, []).append(each)
    kept = {path for path in paths if not any(source.is_config(path) for source in others)}
    if not end or not kept.issuperset(paths[:end]):
        return defaults
    front = tuple((each.config_path, each.package) for each in defaults[:end])
    if front not in FRONTS:
        FRONTS[front] = copies_of(composed(defaults[:end]))
    config = FRONTS[front]()
    changed: list[Any] = []
    for group, part in files.items():
        if not kept.issuperset(each.config_path for each in part):
            changed += part
            continue
        types = [type_at(each.config_path) for each in part]
        key = (front, *((each.config_path, id(type_)) for each, type_ in zip(part, types, strict=True)))
        if key not in PARTS:
            node: Any = composed([Merged(FRONTS[front]()), *part])._get_node(group)
            node._set_parent(None)
            PARTS[key] = types, copies_of(node)
        config.__dict__["_content"][group] = node = PARTS[key][1]()
        node._set_parent(config)
    return [Merged(config), *changed, *defaults[end + len(options) :]]


def merged(loader: Any, files: list[Any], repo: Any) -> DictConfig | None:
    """What such a list comes to where files without types follow a `Merged`: nothing of the latter is merged again."""
    first, *others = files
    if not isinstance(first, Merged) or any(each.config_path.startswith("schema/") for each in others):
        return None
    with flag_override(first.config, "no_deepcopy_set_nodes", True), suppress(OmegaConfBaseException):
        for each in others:
            first.config.merge_with(loader._load_single_config(each, repo).config)
        return first.config
    return None


def type_at(path: str) -> Any:
    """What Hydra was told stands at a path, None for a file."""
    place: Any = ConfigStore.instance().repo
    for name in f"{path}.yaml".split("/"):
        place = place.get(name) if isinstance(place, dict) else None
    return place


def remember_files() -> None:
    """Read each file of `OWN`, the lab's conf/, and of Hydra's once a process, and each type that Hydra was told of."""
    Plugins.instance()  # finds the classes, of which it makes others than one can import
    load_anew = ConfigRepository.load_config

    def load_config(self: Any, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or not source.full_path().startswith((OWN, *FOREVER)):
            return load_anew(self, config_path)
        stored = type_at(config_path)
        key = (source.full_path(), source.provider, config_path, id(stored))
        if key not in FILES:
            FILES[key] = stored, copies_of(load_anew(self, config_path))
        return FILES[key][1]()

    put(ConfigRepository, "load_config", load_config)


def install() -> None:
    """Put the memory in place, for good."""
    list_anew = defaults_list.create_defaults_list
    compose_anew = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list
    load_anew = config_loader_impl.ConfigLoaderImpl._load_single_config

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
        if all(place == OWN or place.startswith(FOREVER) for place in places):
            LISTS[key] = made
        return made

    def compose(self: Any, defaults: list[Any], repo: Any) -> DictConfig:
        if id(defaults) in CONFIGS:
            return CONFIGS[id(defaults)][1]()
        files = with_parts(defaults, repo, lambda files: compose_anew(self, files, repo))
        made = merged(self, files, repo) or compose_anew(self, files, repo)
        if any(defaults is kept.defaults for kept in LISTS.values()):
            CONFIGS[id(defaults)] = defaults, copies_of(made)
        return made

    def load_single(self: Any, default: Any, repo: Any) -> Any:
        return default if isinstance(default, Merged) else load_anew(self, default, repo)

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

    put(DictConfig, "__deepcopy__", copy_of)
    map_anew = defaults_list._create_interpolation_map

    def map_where_read(overrides: Any, entries: list[Any], self_added: bool) -> DictConfig | None:
        is_read = any(entry.is_interpolation() for entry in entries)
        return map_anew(overrides, entries, self_added) if is_read else None

    # Hydra makes it for each file, and reads it where an entry names another's choice.
    put(defaults_list, "_create_interpolation_map", map_where_read)
    # Hydra copies the places where it looks each time, and with one of them all types that it was told of.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    remember_files()
    put(config_loader_impl, "create_defaults_list", create_defaults_list)
    put(config_loader_impl.ConfigLoaderImpl, "_compose_config_from_defaults_list", compose)
    put(config_loader_impl.ConfigLoaderImpl, "_load_single_config", load_single)
