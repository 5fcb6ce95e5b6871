"""Checks whether trainings of one sweep can share a folder: they must agree in all stages that they share.

Each stage of a training has a folder under `output_dir`, and is skipped if that exists. If two trainings make a stage
differently, the second one would be refused only after the first has finished. So this is checked beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.train.config import TrainConfig
from spec_lab.train.options import target_option
from spec_lab.train.stages import CAME_LATER, without_unused
from spec_lab.train.texts.settings import settings_of_texts


def recorded(part: Any) -> dict[str, Any]:
    """Return the keys of `part` as folders record them, without unused keys of later versions (`without_unused`)."""
    return without_unused(asdict(part))


def refuse_to_share(configs: Iterable[TrainConfig]) -> None:
    """Raise UserError if two trainings would make a stage differently in one folder."""
    made: dict[Path, dict[str, Any]] = {}
    for config in configs:
        for folder, knobs in _knobs_of_stages(config).items():
            before = made.setdefault(Path(config.output_dir).absolute() / folder, knobs)
            for knob, first, second in _differences(before, knobs):
                raise UserError(
                    f"output_dir={config.output_dir} would hold {folder} of {knob}={first} and of {knob}={second}; "
                    f"give each training its own folder: 'output_dir={config.output_dir}/${{{knob}}}'"
                )


def _knobs_of_stages(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the knobs that determine each stage, by the name of its folder."""
    option, drafter = target_option(config.target), config.drafter
    source = {"target": {"path": config.target.path}, "texts": config.texts}
    writing = {"prompts": config.prompts, "writing": settings_of_texts(config.writing)}
    stages: dict[str, dict[str, Any]] = {} if config.texts else {"texts": source | writing}
    packing = {key: value for key, value in asdict(config.packing).items() if key != "kept_gigabytes"}
    learnt = {"seed": config.seed, "packing": packing, "drafter": recorded(drafter)}
    stages[f"{option.name}-{drafter.drafts_as}"] = source | learnt
    return stages


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys that differ, with both values."""
    for key in dict.fromkeys((*before, *after)):
        first, second = (settings.get(key, CAME_LATER.get(key)) for settings in (before, after))
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from ((f"{key}.{inner}", *values) for inner, *values in _differences(first, second))
        elif first != second:
            yield key, first, second
