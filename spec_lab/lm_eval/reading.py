"""Reads the arguments of the harness: `--model_args`, which are overrides of a run, sampling, and stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.menu.config import SamplingConfig

USUAL: Mapping[str, str] = {"references": "[]", "profile_rounds": "0"}
"""Default overrides, with which an evaluation has no references and no profile."""
OF_MEASURING = {
    *("workload", "references", "repeats", "warmup_requests", "profile_rounds", "record", "logger"),
    *("name", "output_dir", "fresh", "objective", "experiment", "debug", "size"),
}
"""Parts of a run for prompts, measurement and records, which an evaluation does not read."""


def overrides_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return a `KEY=VALUE` for each of `USUAL` and each argument.

    The harness has already parsed `true`, `null` and numbers. It splits arguments at commas, so lists are typed with
    `;` instead.

    Raises:
        UserError: an argument sets a part of the run that an evaluation does not read.
    """
    for key in arguments:
        if key.partition(".")[0] in OF_MEASURING:
            raise UserError(f"--model_args: {key} is not read, since the harness prompts and scores; leave it out")
    return [f"{key}={_value(value)}" for key, value in {**USUAL, **arguments}.items()]


def cut_at(text: str, until: Sequence[str]) -> str:
    """Return the text before the first stop in it; all of it without a stop."""
    return text[: min([len(text), *(place for stop in until if stop and (place := text.find(stop)) >= 0)])]


def require_sampling(wanted: Mapping[str, Any], sampling: SamplingConfig) -> None:
    """Refuse a task that requires different sampling from the run's, which would be a different benchmark.

    Args:
        wanted: the task's generation_kwargs, with --gen_kwargs in them.
    """
    samples = wanted.get("do_sample", "temperature" in wanted)
    heat = float(wanted.get("temperature") or 0.0) if samples else 0.0
    if heat != sampling.temperature:
        raise UserError(
            f"--model_args: the task samples at temperature {heat:g}, but the run at {sampling.temperature:g}; add "
            f"sampling.temperature={heat:g}, or --gen_kwargs do_sample=true,temperature={sampling.temperature:g}"
        )
    for key in ("top_p", "top_k"):
        if heat and wanted.get(key) is not None and wanted[key] != getattr(sampling, key):
            raise UserError(f"--model_args: the task has {key}={wanted[key]}; add sampling.{key}={wanted[key]}")


def _value(value: Any) -> str:
    if value is None or value == "None":
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text.replace(";", ",") if text.startswith("[") else text
