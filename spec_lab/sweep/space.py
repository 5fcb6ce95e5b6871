"""Checks that runs accept the values that a sweep can give them; of a distribution, three values are checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from spec_lab.core.errors import UserError
from spec_lab.program.launchers import refuse_launcher
from spec_lab.program.options import Menu, run_menu
from spec_lab.program.override_text import as_override
from spec_lab.program.overrides import OF_THE_SWEEP, check_overrides, extensions_in, is_sweep
from spec_lab.sweep.command import as_overrides
from spec_lab.sweep.file import SearchMethod, SweepFile
from spec_lab.sweep.library import load_library, quiet
from spec_lab.sweep.plain import to_plain

PROBED_QUANTILES = (1e-6, 0.5, 1 - 1e-6)
LARGEST_GRID = 10_000
FILE_KEYS = ("method", "metric", "parameters", "run_cap", "command")
"""Keys of a sweep file that no run has."""


def check_space(file: SweepFile, overrides: Sequence[str]) -> None:
    """Check parameters and overrides against the menu of a run.

    Args:
        overrides: those typed after the file, for every run.

    Raises:
        UserError: a key does not exist, a value does not fit it, one key is set in two places, a run cannot choose a
            key, or a grid is too large.
    """
    refuse_launcher([*file.overrides, *overrides], "a search, which asks after each run what to try next,")
    menu = run_menu(extensions_in([*file.overrides, *overrides]))
    for text in overrides:
        if override_key(text) in FILE_KEYS:
            raise UserError(f"{text}: {override_key(text)} is a key of the file; write it in {file.path}")
    check_overrides(overrides, menu=menu)
    swept = set(file.parameters)
    for text in overrides:
        if override_key(text) in swept:
            raise UserError(f"{text}: {file.path} sweeps {override_key(text)}; leave one of the two out")
        _check_single(text, f"{text}: one value for all runs; sweep it under parameters: in {file.path}")
        _check_no_experiment_of_many(text, menu)
    try:
        check_overrides(file.overrides, menu=menu)
        for text in file.overrides:
            if override_key(text) in swept:
                raise UserError(f"command: {text} is also among the parameters; leave one of the two out")
            _check_single(text, f"command: {text} has several values; put them under parameters:")
            _check_no_experiment_of_many(text, menu)
        for name, parameter in file.parameters.items():
            _check_parameter(name, parameter, menu)
        if file.method == SearchMethod.grid:
            _check_grid(file.parameters)
    except UserError as error:
        raise UserError(f"{file.path}: {error}") from error


def override_key(text: str) -> str:
    """Return the key that an override sets."""
    return text.partition("=")[0].lstrip("+")


def _check_parameter(name: str, parameter: Mapping[str, Any], menu: Menu) -> None:
    if name in OF_THE_SWEEP or name.split(".")[0] == "hydra":
        raise UserError(f"parameters.{name}: it cannot be chosen for one run; type it after the file, for all runs")
    for value in _probes(name, parameter):
        if "None" in re.findall(r"\w+", str(value)):
            raise UserError(f"parameters.{name}: null is passed to a run as the text None; write 'null', in quotes")
        [text] = as_overrides({name: value})
        try:
            check_overrides([text], menu=menu)
            quoted = f'"{as_override(name, value).partition("=")[2]}"'
            _check_single(text, f"{text}: a run takes one value; write a list item for each, or {quoted} for one text")
            _check_no_experiment_of_many(text, menu)
        except UserError as error:
            raise UserError(f"parameters.{name}: {error}") from error


def _probes(name: str, parameter: Mapping[str, Any]) -> Iterator[Any]:
    """Yield every listed value, and for a distribution three values: its median and two near its ends."""
    if "values" in parameter:
        yield from parameter["values"]
    elif "value" in parameter:
        yield parameter["value"]
    else:
        load_library()
        from sweeps.params import HyperParameter

        try:
            with quiet():
                values = [to_plain(HyperParameter(name, dict(parameter)).ppf(at)) for at in PROBED_QUANTILES]
        except Exception as error:  # numpy and scipy may raise any class
            raise UserError(f"parameters.{name}: W&B's search cannot draw from it ({error})") from error
        for value in values:
            if not math.isfinite(value):
                raise UserError(f"parameters.{name}: it can give {value}; narrow its range")
        yield from values


def _check_single(text: str, refusal: str) -> None:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(f"{text}: not of the form KEY=VALUE") from error
    if override.is_sweep_override():
        raise UserError(refusal)


def _check_no_experiment_of_many(text: str, menu: Menu) -> None:
    key, _, option = text.partition("=")
    if key == "experiment" and is_sweep(option, menu):
        raise UserError(f"{text} is a sweep of its own; run it with python -m spec_lab {text}")


def _check_grid(parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse grids that W&B cannot search; it lists all combinations before the first one runs."""
    size = math.prod(_number_of_values(name, parameter) for name, parameter in parameters.items())
    if size > LARGEST_GRID:
        raise UserError(f"parameters: a grid of {size:,} runs; use method: random, or fewer values")


def _number_of_values(name: str, parameter: Mapping[str, Any]) -> int:
    if "probabilities" in parameter:
        raise UserError(f"parameters.{name}.probabilities: a grid uses every value once; leave them out")
    if "values" in parameter:
        return len(parameter["values"])
    if "value" in parameter:
        return 1
    if parameter.get("distribution") == "q_uniform":
        return math.ceil((parameter["max"] - parameter["min"]) / parameter.get("q", 1.0))
    if type(parameter.get("min")) is int and type(parameter.get("max")) is int and "distribution" not in parameter:
        return int(parameter["max"]) - int(parameter["min"]) + 1
    if parameter.get("distribution") == "int_uniform":
        return int(parameter["max"]) - int(parameter["min"]) + 1
    raise UserError(f"parameters.{name}: a grid needs values it can list; write values: [...]")
