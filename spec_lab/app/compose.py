"""Composes a run with Hydra, from `conf/`, the schemas of its options, and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from re import compile as pattern
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from spec_lab.app.labels import label
from spec_lab.app.lines import store_lines
from spec_lab.app.names import register_resolvers
from spec_lab.config.extensions import conf_folder as conf_of
from spec_lab.config.extensions import load_options
from spec_lab.config.help import keys
from spec_lab.config.option import options
from spec_lab.config.run import GROUPS, Run
from spec_lab.core.errors import UserError

VERSION_BASE = "1.3"
SEARCH_PATH = "hydra.searchpath"
ONLY_SET_KEYS = ("experiment", "line", "debug")
"""Groups of `conf/` that are not parts of a run."""
UNKNOWN = pattern(
    r"Could not override '(?P<override>[^'@]+)'|Key '[^']+' (is )?not in (.*\n)*? *full_key: (?P<full>\S+)"
)
"""How Hydra and OmegaConf name a key that does not exist."""


@dataclass(slots=True)
class Composed:
    """A composed run that has not started.

    Attributes:
        config: the typed config, which may be changed, since it is checked when it runs.
        options: the option chosen in each group.
        usual: what these options compose to alone, by group.
        typed: the overrides, as a name of the run's folder has them.
    """

    config: Run
    options: dict[str, str]
    usual: Mapping[str, Any]
    typed: str = ""

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
        raise explained(error) from error
    finally:
        GlobalHydra.instance().hydra = callers


def prepared(arguments: Sequence[str], *more: str) -> list[str]:
    """Load the extensions that are typed, make all schemas known to Hydra, and return the arguments for Hydra: the
    overrides with `more` of them, and then the flags, since Hydra does not allow these between overrides.

    They search the `conf/` of extensions too. They force each knob that only some of the swept options of its group
    have, as in `-m acceptance=strict,typical acceptance.epsilon=0.1`; `to_composed` leaves it out of the other jobs.
    """
    register_resolvers()
    extensions = load_options(extensions_in(arguments))
    _store("schema", "run", Run)
    for group in GROUPS:
        for name, option in options(group).items():
            _store(f"schema/{group}", name, option)  # type: ignore[arg-type]
    folders = [folder for folder in map(conf_of, extensions) if folder is not None]
    store_lines(arguments, [conf_folder(), *folders], GROUPS)
    words = [word for word in arguments if _is_override(word)]
    flags = [word for word in arguments if not _is_override(word)]
    if folders:
        typed = [word for word in words if word.startswith(f"{SEARCH_PATH}=")]
        searched = [*(folder for word in typed for folder in _values(word)), *(folder.as_uri() for folder in folders)]
        words = [word for word in words if word not in typed] + [f"{SEARCH_PATH}=[{','.join(map(repr, searched))}]"]
    parts = [word.partition("=") for word in words]
    swept = {key for key, _, value in parts if key in GROUPS and ("," in value or "(" in value)}
    forced = {key for key in keys().keys() - keys(own=False).keys() if key.partition(".")[0] in swept}
    words = [f"++{word}" if key in forced else word for word, (key, _, _) in zip(words, parts, strict=True)]
    return [*words, *more, *flags]


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


@cache
def _store(group: str, name: str, schema: type) -> None:
    """Make a schema known to Hydra. Making its node is slow compared with composing."""
    ConfigStore.instance().store(group=group, name=name, node=schema)


def extensions_in(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that `extensions=[...]` names, which must be loaded before anything is composed."""
    return tuple(name for word in arguments if word.startswith("extensions=") for name in _values(word))


def _values(override: str) -> list[str]:
    value = OverridesParser.create().parse_override(override).value()
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def to_composed(cfg: DictConfig, settings: Any) -> Composed:
    """Return a composed run with its types; `settings` are Hydra's.

    A knob that only other options of its group have is left out of a job of a sweep, with a line.

    Raises:
        UserError: an added key is not read by anything, which OmegaConf would drop silently.
    """
    config: Any = OmegaConf.to_object(cfg)
    known = {} if OmegaConf.is_missing(settings.job, "num") else keys()
    for part, key in _unread(config):
        if key not in known:
            raise UserError(f"{key} is not read by the chosen options; leave it out")
        delattr(part, key.rpartition(".")[2])
        print(f"{key} is left out, since {key.partition('.')[0]}={part.name} does not have it")
    choices = settings.runtime.choices
    chosen = {group: choices[group] for group in (*GROUPS, *ONLY_SET_KEYS) if choices.get(group) is not None}
    return Composed(_with_k(config), chosen, _usual(chosen, settings), settings.job.override_dirname)


def _unread(config: Any, prefix: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the parts of a run that have a key which their class does not have, each with that key."""
    declared = {field.name for field in dataclasses.fields(config)}
    for name, value in list(vars(config).items()):
        if name not in declared:
            yield config, prefix + name
        elif dataclasses.is_dataclass(value):
            yield from _unread(value, f"{prefix}{name}.")


def _with_k(run: Run) -> Run:
    """Return the run with the depth of its tree as K, if K has its default. A typed K that differs is refused."""
    drafter, sizes = run.drafter, run.sizes
    if sizes is None or not drafter.drafts or drafter.num_draft_tokens != type(drafter)().num_draft_tokens:
        return run
    return run.with_parts(drafter=dataclasses.replace(drafter, num_draft_tokens=sizes.depth))


def _usual(chosen: Mapping[str, str], settings: Any) -> Mapping[str, Any]:
    groups = tuple(f"{group}={option}" for group, option in chosen.items() if group in GROUPS)
    folders = tuple(word for word in settings.overrides.hydra if word.startswith(f"{SEARCH_PATH}="))
    return _composed_alone((*folders, *groups), tuple(source.path for source in settings.runtime.config_sources))


@cache
def _composed_alone(overrides: tuple[str, ...], sources: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the parts of a run of these options alone. `sources` are the folders that Hydra searches."""
    cfg = GlobalHydra.instance().config_loader().load_configuration("config", list(overrides), RunMode.RUN)
    return {group: OmegaConf.to_object(cfg[group]) for group in GROUPS}


def explained(error: Exception) -> UserError:
    """Return what Hydra or OmegaConf says as a refusal; for a key that does not exist, a line with the nearest one."""
    text = "\n".join(str(one) for one in (error, error.__cause__) if one is not None)
    if (found := UNKNOWN.search(text)) is None:
        return UserError(text)
    key, known = found["override"] or found["full"], keys()
    if key in known:
        return UserError(f"{key} is not read by the chosen options; leave it out, or choose one that has it")
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    near = [names[name] for name in get_close_matches(key, names, n=1)]
    return UserError(f"there is no key {key}; {f'did you mean {near[0]}?' if near else 'see --help'}")
