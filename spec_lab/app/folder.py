"""Names the folders of runs and sweeps for `hydra.run.dir`, `hydra.sweep.dir` and `hydra.sweep.subdir`.

A name says the options, the knobs that were typed, and a digest of the configuration and of the lab's source files. So
results of edited code have another folder, and nothing is written over.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spec_lab.app.labels import fit_for_a_file
from spec_lab.config.extensions import load_options
from spec_lab.core.errors import KERNELS

NAMED_GROUPS = ("engine", "target", "drafter", "acceptance", "prune", "graph", "tree")
NOT_NAMED = ("auto", "none", "lab")
"""Options that a name does not need: what `auto` becomes is known later, and `tree=none` is usual."""
MAX_LENGTH = 120
NOT_READ = ("name", "output_dir", "fresh", "logger", "objective", "study", "size")
"""Keys of a configuration that do not change a run's results."""
NOT_SHOWN = ("extensions", "experiment", "size", "debug", "references", "repeats", "profile_rounds", "warmup_requests")
"""Typed keys that names leave out, beside those of `NOT_READ`."""
SOURCES = (".py", ".yaml", ".jsonl", ".c", ".h")


def register_resolvers() -> None:
    """Make what stands in `conf/` as `${NAME:}` known to OmegaConf."""
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("free", lambda place: str(free(Path(place))), replace=True)
    # Hydra gives each job the names that were cached when the sweep began.
    OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("share_of_a_job", share_of_a_job, replace=True)


def run_name(*, _root_: DictConfig) -> str:
    """Return `run-pocket-eagle3-strict-catchup-batch_size4-1a2b3c4d` for a composed run with Hydra's settings."""
    settings = _root_.hydra
    options = [settings.runtime.choices.get(group) for group in NAMED_GROUPS]
    plain = OmegaConf.create({key: _root_._get_node(key) for key in _root_ if key != "hydra"})
    values: Any = OmegaConf.to_container(plain, resolve=True, throw_on_missing=False)
    words = [_typed(word) for word in settings.overrides.task]
    return folder_name(values, [*(str(option) for option in options if option not in NOT_NAMED), *filter(None, words)])


def folder_name(values: Mapping[str, Any], parts: Iterable[str]) -> str:
    """Return the name of a run's folder from its configuration and the parts that are named."""
    name = fit_for_a_file("-".join([values["name"], *parts]), MAX_LENGTH)
    return f"{name}-{digest(sources(tuple(values['extensions'])), values_read(values))}"


def sweep_name(output_dir: str, name: str, overrides: Sequence[str], params: Any, fresh: bool) -> str:
    """Return the folder of a sweep: the newest one of the same command and sources, or with `fresh` a new one."""
    typed = sorted(word for word in overrides if word.lstrip("+").partition("=")[0] not in NOT_READ)
    swept = OmegaConf.to_container(params, resolve=False) if isinstance(params, DictConfig) else None
    base = Path(output_dir) / f"{name}-sweep-{digest(sources(), typed, swept)}"
    *taken, new = _numbered(base)
    return str(taken[-1] if taken and not fresh else new)


def share_of_a_job(device: str) -> dict[str, int]:
    """Return what a job asks Ray for: a GPU, or one of the CPUs of which each machine has one for Ray.

    If its process dies, it is not started again, since its record would then be of another process.
    """
    import torch

    on_gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    return {"num_gpus": int(on_gpu), "num_cpus": int(not on_gpu), "max_retries": 0}


def free(base: Path) -> Path:
    """Return `base`, or `base-2` and so on: the first that does not exist."""
    *_, new = _numbered(base)
    return new


def _numbered(base: Path) -> Iterator[Path]:
    """Yield the folders of this name that exist, and then the next one."""
    for number in itertools.count(1):
        place = base if number == 1 else base.with_name(f"{base.name}-{number}")
        yield place
        if not place.exists():
            return


def _typed(override: str) -> str | None:
    """Return what a name says of an override, such as `batch_size4`; None for one that it leaves out."""
    key, _, value = override.lstrip("+~").partition("=")
    if key in (*NAMED_GROUPS, *NOT_READ, *NOT_SHOWN):
        return None
    if key == "line":
        return value
    knob = key.rpartition(".")[2]
    return Path(value).name if knob.endswith("path") else f"{knob}{'' if value[:1].isdigit() else '_'}{value}"


def values_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that a run's results depend on."""
    return {key: value for key, value in values.items() if key not in NOT_READ}


def digest(*values: Any) -> str:
    """Return eight hexadecimal digits for plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]


@cache
def sources(extensions: tuple[str, ...] = ()) -> str:
    """Return a digest of the source files of spec_lab, its kernels and the extensions, as the process began with."""
    package, kernels = Path(__file__).parents[1], find_spec(KERNELS)
    places = [package, package.parent / "conf"]
    places += [Path(kernels.origin).parent] if kernels is not None and kernels.origin is not None else []
    for module in load_options(extensions):
        file = Path(module.__file__ or "")
        places.append(file.parent if file.name == "__init__.py" else file)
    found = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.suffix in SOURCES:
                found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()
