"""Composes a run with Hydra, from `conf/`, the schemas of its options, and overrides."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from spec_lab.app.folder import register_resolvers
from spec_lab.app.labels import label
from spec_lab.app.lines import LINE, by_size, store_lines
from spec_lab.config.extensions import conf_folder as conf_of
from spec_lab.config.extensions import load_options
from spec_lab.config.help import keys
from spec_lab.config.nearest import hint, nearest
from spec_lab.config.offers import with_k
from spec_lab.config.option import schemas
from spec_lab.config.run import GROUPS, Run
from spec_lab.core.errors import UserError

VERSION_BASE = "1.3"
SEARCH_PATH = "hydra.searchpath"
ONLY_SET_KEYS = ("experiment", LINE, "debug")
"""Groups of `conf/` that are not parts of a run."""
UNKNOWN = re.compile(
    r"Could not override '(?P<override>[^'@]+)'|Key '[^']+' (is )?not in (.*\n)*? *full_key: (?P<full>\S+)"
)
"""How Hydra and OmegaConf name a key that does not exist."""
ONE_AT_A_TIME = threading.Lock()
"""Hydra keeps global state while it composes."""


@dataclass(slots=True)
class Composed:
    """A composed run that has not started.

    Attributes:
        config: the typed config, which may be changed, since it is checked when it runs.
        options: the option chosen in each group.
        usual: what these options compose to alone, by group.
    """

    config: Run
    options: dict[str, str]
    usual: Mapping[str, Any]

    @property
    def choices(self) -> dict[str, str]:
        """Return a name for each group's choice, such as `prune: catchup`: its option and the knobs that differ."""
        return {
            group: label(option, getattr(self.config, group), self.usual[group]) if group in GROUPS else option
            for group, option in self.options.items()
        }


def conf_folder() -> Path:
    """Return `conf/`: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").is_file())


def compose(overrides: Sequence[str] = ()) -> Composed:
    """Return the run that `python -m spec_lab OVERRIDES...` would run.

    Raises:
        UserError: it does not compose, or is several runs.
    """
    with ONE_AT_A_TIME:
        callers = GlobalHydra.instance().hydra  # Hydra's state exists once in a process
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(conf_folder()), job_name="spec_lab", version_base=VERSION_BASE):
                composed = hydra.compose("config", prepared(overrides), return_hydra_config=True)
                if composed.hydra.mode is RunMode.MULTIRUN:
                    raise UserError(f"{' '.join(overrides)} is several runs; compose them one after the other")
                settings = composed.hydra
                with open_dict(composed):
                    del composed["hydra"]
                return to_composed(composed, settings)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(explained(error, keys())) from error
        finally:
            GlobalHydra.instance().hydra = callers


def prepared(arguments: Sequence[str]) -> list[str]:
    """Load the extensions that are typed, make all schemas known to Hydra, and return the arguments for Hydra.

    These search the `conf/` of extensions too. They force each knob that only some of the swept options of its group
    have, as in `-m acceptance=strict,typical acceptance.epsilon=0.1`; `to_composed` leaves it out of the other jobs.
    """
    register_resolvers()
    OmegaConf.register_new_resolver("by_size", by_size, replace=True)
    extensions = load_options(extensions_in(arguments))
    store(schemas())
    folders = [folder for folder in map(conf_of, extensions) if folder is not None]
    store_lines(arguments, [conf_folder(), *folders], GROUPS)
    swept = {key for key, value in map(_split, arguments) if key in GROUPS and ("," in value or "(" in value)}
    own = {key for key in keys() if key.partition(".")[0] in swept and key not in keys(Run)}
    words = [f"++{word}" if _split(word)[0] in own and word[0] not in "+~" else word for word in arguments]
    if folders:
        typed = [word for word in words if word.startswith(f"{SEARCH_PATH}=")]
        searched = [*(folder for word in typed for folder in _values(word)), *(folder.as_uri() for folder in folders)]
        words = with_override(
            [word for word in words if word not in typed], f"{SEARCH_PATH}=[{','.join(map(repr, searched))}]"
        )
    return words


def with_override(arguments: Sequence[str], override: str) -> list[str]:
    """Add an override behind the others, since Hydra does not allow flags between overrides."""
    behind = max((i + 1 for i, word in enumerate(arguments) if _split(word)[0]), default=len(arguments))
    return [*arguments[:behind], override, *arguments[behind:]]


def extensions_in(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that `extensions=[...]` names, which must be loaded before anything is composed."""
    return tuple(name for word in arguments if word.startswith("extensions=") for name in _values(word))


def _values(override: str) -> list[str]:
    value = OverridesParser.create().parse_override(override).value()
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def _split(word: str) -> tuple[str, str]:
    """Return key and value of an override; an empty key for a flag."""
    key, _, value = word.lstrip("+~").partition("=")
    return ("", word) if word.startswith("-") or "=" not in word else (key, value)


def store(schemas: Mapping[str, type]) -> None:
    """Make `schemas` known to Hydra as `/schema/NAME`."""
    for path, schema in schemas.items():
        group, _, name = f"schema/{path}".rpartition("/")
        stored: Any = ConfigStore.instance().repo
        for part in (*group.split("/"), f"{name}.yaml"):
            stored = stored.get(part, {})
        if not stored or OmegaConf.get_type(stored.node) is not schema:  # making a node is slow compared with composing
            ConfigStore.instance().store(group=group, name=name, node=schema)


def call_hydra(
    task: Callable[[DictConfig], Any], arguments: Sequence[str], folder: Path, known: Collection[str] = ()
) -> int:
    """Let Hydra run `task` with the configuration in `folder`, as its manual says, and return the exit code.

    Args:
        known: the keys among which the nearest one to a misspelt key is found.

    Raises:
        UserError: the arguments do not compose.
        Exception: the error of a task that is not part of a multirun.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises errors, and does not end the process itself
    argv = sys.argv
    sys.argv = [argv[0], *arguments]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(folder), config_name="config")(task)()
        return 0
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explained(error, known)) from error
    except SystemExit as error:  # of Hydra, and of a multirun
        return error.code if isinstance(error.code, int) else 1
    finally:
        sys.argv = argv


def quoted(key: str, value: object) -> str:
    """Return an override that Hydra reads as exactly the text of `value`, such as a path with special characters."""
    escaped = str(value).replace("'", r"\'")
    return f"{key}='{escaped}'"


def to_composed(cfg: DictConfig, settings: Any) -> Composed:
    """Return a composed run with its types; `settings` are Hydra's.

    A knob that only other options of its group have is left out of a job of a sweep, with a line.

    Raises:
        UserError: an added key is not read by anything, or has the wrong type.
    """
    in_sweep, unread = not OmegaConf.is_missing(settings.job, "num"), list(_unread(cfg))
    known = keys() if unread and in_sweep else {}
    for key in unread:
        if key not in known:
            raise UserError(f"{key} is not read by the chosen options; leave it out")
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Run)
    for group, _, name in (key.partition(".") for key in unread):
        delattr(part := getattr(config, group), name)
        print(f"{group}.{name} is left out, since {group}={part.name} does not have it")
    options = chosen_options(settings)
    return Composed(with_k(config), options, _usual(options, settings))


def chosen_options(settings: Any) -> dict[str, str]:
    """Return the option chosen in each group; the size only if there is an experiment, which may use it."""
    choices = settings.runtime.choices
    groups = [*GROUPS, *(group for group in ONLY_SET_KEYS if group != "size" or choices.get("experiment"))]
    return {group: choices[group] for group in groups if choices.get(group) is not None}


def _usual(options: Mapping[str, str], settings: Any) -> Mapping[str, Any]:
    groups = tuple(f"{group}={option}" for group, option in options.items() if group in GROUPS)
    folders = tuple(word for word in settings.overrides.hydra if word.startswith(f"{SEARCH_PATH}="))
    sources = tuple(source.path for source in settings.runtime.config_sources)
    return _composed_alone((*folders, *groups), sources)


@cache
def _composed_alone(overrides: tuple[str, ...], sources: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the parts of a run of these options alone. `sources` are the folders that Hydra searches."""
    loader = GlobalHydra.instance().config_loader()
    cfg = loader.load_configuration("config", list(overrides), RunMode.RUN)
    return {group: OmegaConf.to_object(cfg[group]) for group in GROUPS}


def _unread(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield keys that were added to a typed node, which OmegaConf would drop silently."""
    declared = {field.name for field in dataclasses.fields(OmegaConf.get_type(node))}  # type: ignore[arg-type]
    for key in map(str, node):
        child = None if OmegaConf.is_missing(node, key) else node._get_node(key)
        if key not in declared:
            yield prefix + key
        elif isinstance(child, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(child)):
            yield from _unread(child, f"{prefix}{key}.")


def explained(error: Exception, known: Collection[str]) -> str:
    """Return the message of Hydra or OmegaConf; for a key that does not exist, a line with the nearest one."""
    text = "\n".join(str(one) for one in (error, error.__cause__) if one is not None)
    found = UNKNOWN.search(text)
    if found is None:
        return text
    key = found["override"] or found["full"]
    if key in known:
        return f"{key} is not read by the chosen options; leave it out, or choose one that has it"
    return f"there is no key {key}{hint(nearest(key, known))}"
