"""Reads a W&B sweep file. Keys and values that W&B or the lab would not understand are refused, with the file and the
key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Choice
from spec_lab.program.yaml_file import read_yaml
from spec_lab.sweep.command import fixed_overrides
from spec_lab.sweep.library import load_library, quiet
from spec_lab.sweep.plain import plain_problem

PARAMETER = "write value: X, values: [X, Y] or min: and max:, with numbers that the distribution allows"
LARGEST_FILE = 1_000_000
RUN_CAP = "run_cap"
"""A key that W&B's server supports but that is not in the schema of its search code."""


class SearchMethod(Choice):
    """The ways to search that W&B's code has without its server."""

    grid = "grid"
    random = "random"
    bayes = "bayes"


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A sweep file that can be run.

    Attributes:
        config: the file without `run_cap`, for W&B's search code.
        overrides: the overrides that its command gives every run, as written.
        run_cap: the largest number of runs; None if the file does not say.
    """

    path: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]
    run_cap: int | None

    @property
    def method(self) -> SearchMethod:
        return SearchMethod(self.config["method"])

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        return dict(self.config["parameters"])

    @property
    def metric(self) -> str | None:
        """Return the name of the number that is optimised or shown."""
        return self.config["metric"]["name"] if "metric" in self.config else None

    @property
    def maximizes(self) -> bool:
        return self.config.get("metric", {}).get("goal", "minimize") == "maximize"

    @property
    def target(self) -> float | None:
        """Return the value of the metric that ends the sweep once a run reaches it; None if the file has none."""
        return self.config.get("metric", {}).get("target")


def read_sweep_file(path: Path) -> SweepFile:
    """Read and check a sweep file, except its parameters' values, for which a run's menu is needed.

    Raises:
        UserError: the file cannot be read, is not a sweep file, or asks for something that is not supported here.
    """
    config = _load(path)
    try:
        run_cap = _take_run_cap(config)
        _check_against_schema(config)
        _check_support(config)
        overrides = fixed_overrides(config.get("command"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return SweepFile(path, config, overrides, run_cap)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path}: larger than {LARGEST_FILE} bytes; is it a sweep file?")
        config = read_yaml(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); name a sweep file such as sweeps/*.yaml"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a sweep file; it needs the keys method and parameters")
    problem = plain_problem(config)
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return config


def _take_run_cap(config: dict[str, Any]) -> int | None:
    run_cap = config.pop(RUN_CAP, None)
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise UserError(f"{RUN_CAP}: {run_cap!r} is not a number of runs; use 1 or more")
    return run_cap


def _check_against_schema(config: dict[str, Any]) -> None:
    """Raise UserError for a defect that W&B's own validation finds, or for a key that is not read. The key is named if
    it is known, since W&B's message may not name it."""
    if "early_terminate" in config:
        raise UserError(
            "early_terminate: a run reports its metric only once, at its end, so it cannot be stopped early; leave it "
            "out"
        )
    library = load_library()
    from sweeps.config.schema import sweep_config_jsonschema, validator

    known = [*sweep_config_jsonschema["properties"], RUN_CAP]
    for key in config:
        if key not in known:
            raise UserError(f"{key}: a sweep file has no such key{_did_you_mean(key, known)}")
    parameters = config.get("parameters")
    for name, parameter in parameters.items() if isinstance(parameters, dict) else ():
        _check_parameter_keys(name, parameter, sweep_config_jsonschema["definitions"])
    for error in validator.iter_errors(config):
        place = ".".join(map(str, error.absolute_path))
        remedy = f"; {PARAMETER}" if place.startswith("parameters.") and error.context else ""
        raise UserError((f"{place}: {_short(error.message)}" if place else _short(error.message)) + remedy)
    try:
        with quiet():
            violations = library.schema_violations_from_proposed_config(config)
    except Exception as error:  # it may raise any class
        raise UserError(f"W&B's validation refuses it ({_short(str(error))})") from error
    if violations:
        raise UserError(f"parameters: {_short(violations[0])}")


def _check_parameter_keys(name: str, parameter: Any, definitions: Mapping[str, Any]) -> None:
    if not isinstance(parameter, dict):
        raise UserError(
            f"parameters.{name}: {_short(repr(parameter))} is not a set of keys; write value: or values: [...]"
        )
    if "parameters" in parameter:
        raise UserError(
            f"parameters.{name}: nested parameters are passed to a run as one value; write parameters.{name}.KEY"
        )
    known = {
        key for kind, shape in definitions.items() if kind.startswith("param_") for key in shape.get("properties", ())
    }
    known |= {
        key
        for shape in definitions.values()
        for option in shape.get("anyOf", ())
        for key in option.get("properties", ())
    }
    for key in parameter:
        if key not in known:
            raise UserError(f"parameters.{name}.{key}: a parameter has no such key{_did_you_mean(key, known)}")


def _check_support(config: dict[str, Any]) -> None:
    if config["method"] not in list(SearchMethod):
        raise UserError(f"method: {config['method']} needs a server; use one of {', '.join(SearchMethod)}")
    if "metric" not in config:
        if config["method"] == SearchMethod.bayes:
            raise UserError("metric: method bayes needs one; add metric: {name: summary.speedup, goal: maximize}")
        return


def _short(message: str, width: int = 160) -> str:
    line = " ".join(message.split())
    return line if len(line) <= width else line[: width - 3] + "..."
