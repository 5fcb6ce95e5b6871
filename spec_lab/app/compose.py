"""Composes a run with Hydra, from `conf/`, the schemas of its options, and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from spec_lab.app.names import choice_name, register_resolvers
from spec_lab.config.extensions import conf_folders, load_options
from spec_lab.config.help import keys
from spec_lab.config.option import options
from spec_lab.config.run import GROUPS, Run
from spec_lab.core.errors import UserError

VERSION_BASE = "1.3"
ONLY_SET_KEYS = ("experiment", "line", "debug")
"""Groups of `conf/` that are not parts of a run."""


@dataclass(slots=True)
class Composed:
    """A composed run that has not started.

    Attributes:
        config: the typed config, which may be changed, since it is checked when it runs.
        options: the option chosen in each group.
        typed: the overrides, as a name of the run's folder has them.
    """

    config: Run
    options: dict[str, str]
    typed: str = ""

    @property
    def choices(self) -> dict[str, str]:
        """Return a name for each group's choice, such as `prune: catchup`."""
        named = {group: option for group, option in self.options.items() if group in GROUPS and group != "logger"}
        return self.options | {group: choice_name(name, getattr(self.config, group)) for group, name in named.items()}


def conf_folder() -> Path:
    """Return `conf/`: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").is_file())


def compose(overrides: Sequence[str] = ()) -> Composed:
    """Return the run that `python -m spec_lab OVERRIDES...` would run.

    Raises:
        UserError: it does not compose, or is several runs.
    """
    GlobalHydra.instance().clear()  # Hydra's state exists once in a process
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


def prepared(arguments: Sequence[str], *more: str) -> list[str]:
    """Load the typed extensions, make all schemas and a study's lines known to Hydra, and return the arguments for
    Hydra: the overrides with `more` of them, and then the flags, since Hydra does not allow these between overrides.

    Each knob that only some of the swept options of its group have is forced, as in `-m acceptance=strict,typical
    acceptance.epsilon=0.1`; `to_composed` leaves it out of the other jobs.
    """
    folders = conf_folders(load_options(extensions_in(arguments)))
    register_resolvers(folders)
    _store("schema", "run", Run)
    for group in GROUPS:
        for name, option in options(group).items():
            _store(f"schema/{group}", name, option)  # type: ignore[arg-type]
    _store_lines(arguments, [conf_folder(), *folders])
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    flags = [word for word in arguments if word not in overrides]
    parts = [word.partition("=") for word in overrides]
    swept = {key for key, _, value in parts if key in GROUPS and ("," in value or "(" in value)}
    forced = {key for key in keys().keys() - keys(own=False).keys() if key.partition(".")[0] in swept}
    words = [f"++{word}" if key in forced else word for word, (key, _, _) in zip(overrides, parts, strict=True)]
    return [*words, *more, *flags]


def extensions_in(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that `extensions=[...]` names, which must be loaded before anything is composed."""
    typed = [word.partition("=")[2] for word in arguments if word.startswith("extensions=")]
    return tuple(name for names in typed for name in yaml.safe_load(names))


@cache
def _store(group: str, name: str, schema: type) -> None:
    """Make a schema known to Hydra. Making its node is slow compared with composing."""
    ConfigStore.instance().store(group=group, name=name, node=schema)


def _store_lines(arguments: Sequence[str], folders: Iterable[Path]) -> None:
    """Make the lines of the typed experiment known to Hydra, which sweeps them as the options of the group `line`:

        study:
          lines:
            strict: [acceptance=strict]
            loose: [acceptance=relaxed_thinking, acceptance.delta=0.6]

    Its YAML is in the folder of a typed `--config-dir`, or in one of `folders`.
    """
    names = [word.partition("=")[2] for word in arguments if word.startswith("experiment=")]
    own = [Path(place) for word, place in pairwise(arguments) if word in ("--config-dir", "-cd")]
    files = [folder / "experiment" / f"{name}.yaml" for name in names for folder in (*own, *folders)]
    for file in [file for file in files if file.is_file()][:1]:
        study = yaml.safe_load(file.read_text(encoding="utf-8")).get("study") or {}
        for line, overrides in (study.get("lines") or {}).items():
            chosen = [word.split("=") for word in overrides if word.partition("=")[0] in GROUPS]
            values = OmegaConf.from_dotlist([word for word in overrides if word.partition("=")[0] not in GROUPS])
            defaults = ["_self_", *({f"override /{group}": option} for group, option in chosen)]
            node = OmegaConf.merge({"defaults": defaults}, values)
            ConfigStore.instance().store(str(line), node, group="line", package="_global_")


def to_composed(cfg: DictConfig, settings: Any) -> Composed:
    """Return a composed run with its types; `settings` are Hydra's.

    A knob that only other options of its group have is left out of a job of a sweep, with a line.

    Raises:
        UserError: an added key is not read by anything, which OmegaConf would drop silently.
    """
    config: Any = OmegaConf.to_object(cfg)
    left_out = {} if OmegaConf.is_missing(settings.job, "num") else keys()
    parts = {f"{name}.": part for name, part in vars(config).items() if dataclasses.is_dataclass(part)}
    for prefix, part in {"": config, **parts}.items():
        for name in vars(part).keys() - {field.name for field in dataclasses.fields(part)}:
            if prefix + name not in left_out:
                raise UserError(f"{prefix}{name} is not read by the chosen options; leave it out")
            delattr(part, name)
            print(f"{prefix}{name} is left out, since {prefix[:-1]}={part.name} does not have it")
    choices = settings.runtime.choices
    chosen = {group: choices[group] for group in (*GROUPS, *ONLY_SET_KEYS) if choices.get(group) is not None}
    return Composed(config, chosen, settings.job.override_dirname)


def explained(error: Exception) -> UserError:
    """Return what Hydra or OmegaConf says as a refusal; for a key that nothing reads, a line with the nearest one."""
    unknown = [one for one in (error, error.__cause__) if isinstance(one, (ConfigAttributeError, ConfigKeyError))]
    if not unknown:
        return UserError("\n".join(str(one) for one in (error, error.__cause__) if one is not None))
    key, known = str(unknown[0].full_key), keys()
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    near = [] if key in known else get_close_matches(key, names, n=1)
    remedy = f"did you mean {names[near[0]]}?" if near else "leave it out, or see --help"
    return UserError(f"no chosen option has a key {key}; {remedy}")
