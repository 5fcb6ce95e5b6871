"""Names the folders of runs and sweeps, for `hydra.run.dir`, `hydra.sweep.dir` and `hydra.sweep.subdir`, and what a run
chose, for its record.

A folder's name says what was typed, and has a digest of everything that the run reads. So results of edited code have
another folder, and nothing is written over.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from operator import mul
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import spec_kernels
import spec_lab
from spec_lab.config.extensions import load_options
from spec_lab.config.option import default_of
from spec_lab.config.run import GROUPS, Run
from spec_lab.core.errors import UserError
from spec_lab.core.file_stamps import file_stamps

MAX_LENGTH = 120
NOT_READ = ("name", "output_dir", "logger", "objective", "study", "size")
"""Keys of a configuration that do not change a run's results."""
SOURCES = (".py", ".yaml", ".jsonl", ".c", ".h")


def register_resolvers(folders: Sequence[Path]) -> None:
    """Make what stands in `conf/` as `${NAME:}` known to OmegaConf. Hydra searches `folders` too."""
    OmegaConf.register_new_resolver("searchpath", lambda: [folder.as_uri() for folder in folders], replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("free", lambda place: str(free(Path(place))), replace=True)
    # Hydra gives each job the names that were cached when the sweep began.
    OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("by_size", by_size, replace=True)
    OmegaConf.register_new_resolver("times", mul, replace=True)


def run_name(*, _root_: DictConfig) -> str:
    """Return `run-batch_size_4-prune_catchup-1a2b3c4d` for a composed run with Hydra's settings."""
    parts: Any = OmegaConf.to_object(OmegaConf.masked_copy(_root_, [field.name for field in fields(Run)]))
    return folder_name(Run(**parts), _root_.hydra.job.override_dirname)


def folder_name(run: Run, typed: str) -> str:
    """Return the name of a run's folder."""
    said = re.sub(r"[^A-Za-z0-9._,+-]+", "_", "-".join(filter(None, [run.name, typed])))
    return f"{said[:MAX_LENGTH].rstrip('-+._,')}-{digest_of(run)}"


def choice_name(option: str, part: Any) -> str:
    """Return the name of what a run chose in a group: the option, and each knob that differs from its class.

    `acceptance=relaxed_thinking acceptance.topk=3` is `relaxed_thinking+topk=3`. A logger has the name of its option
    alone. The drafter's K is left out, since tables have a column for it. Of a path or an address it has what follows
    the last slash: a record's names are sent to others.
    """
    knobs = [knob for knob in fields(part) if knob.name not in ("name", "num_draft_tokens")]
    own = {knob.name: value for knob in knobs if (value := getattr(part, knob.name)) != default_of(knob)}
    said = (f"{key}={str(value).rstrip('/').rpartition('/')[2]}" for key, value in own.items())
    return "+".join([option, *said])[:MAX_LENGTH]


def digest_of(run: Run) -> str:
    """Return a digest of a run's configuration, the source files, and the weights and prompt files that it reads."""
    values, files = {key: value for key, value in asdict(run).items() if key not in NOT_READ}, []
    with suppress(UserError):  # it will be refused
        files = [file for group in GROUPS for file in getattr(run, group).files(run) if file.exists()]
    return digest(sources(tuple(run.extensions)), values, file_stamps(files), run.engine.lasting or time.time_ns())


def sweep_name(output_dir: str, name: str, overrides: Sequence[str], params: Any) -> str:
    """Return the folder of a sweep: that of the same command and sources, which so goes on where it was."""
    typed = sorted(word for word in overrides if word.lstrip("+").partition("=")[0] not in NOT_READ)
    return str(Path(output_dir) / f"{name}-sweep-{digest(sources(), typed, str(params))}")


def by_size(small: Any, full: Any, *, _root_: Any) -> Any:
    """Return the one of two values that `size` asks for: `${by_size:9,180}`."""
    return full if _root_.size == "full" else small


def free(base: Path) -> Path:
    """Return `base`, or `base-2` and so on: the first that does not exist."""
    others = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(place for place in itertools.chain([base], others) if not place.exists())


def digest(*values: Any) -> str:
    """Return eight hexadecimal digits for plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]


@cache
def sources(extensions: tuple[str, ...] = ()) -> str:
    """Return a digest of the source files of spec_lab, its kernels and the extensions, as the process began with."""
    modules = [spec_lab, spec_kernels, *load_options(extensions)]
    places = [Path(place) for module in modules for place in getattr(module, "__path__", [module.__file__])]
    places.append(places[0].parent / "conf")
    found = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.suffix in SOURCES:
                found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()
