"""What a sweep file may get wrong: one line that names file and key, exit code 2, nothing left behind."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_lab.core.errors import UserError
from spec_lab.sweep.__main__ import main
from spec_lab.sweep.command import EXAMPLE
from spec_lab.sweep.library import load_library

pytestmark = pytest.mark.usefixtures("search_code")

COMMAND = ["${env}", "${interpreter}", "-m", "spec_lab", "${args_no_hyphens}"]
GOOD: dict[str, Any] = {
    "method": "random",
    "run_cap": 2,
    "metric": {"name": "summary.speedup", "goal": "maximize"},
    "parameters": {"drafter.num_draft_tokens": {"values": [1, 3]}, "seed": {"min": 0, "max": 9}},
    "command": COMMAND,
}


def changed(place: str, value: Any) -> dict[str, Any]:
    """GOOD with `value` at a slashed place; None takes the key away."""
    config = copy.deepcopy(GOOD)
    *parents, last = place.split("/")
    inner = config
    for key in parents:
        inner = inner.setdefault(key, {})
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return config


def refused_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*arguments, "--dry-run"]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("refused: ")
    return line


def test_the_command_that_a_refusal_shows_is_one_that_yaml_reads() -> None:
    assert yaml.safe_load(EXAMPLE) == {"command": COMMAND}


def test_good_file_is_not_refused(empty_folder: Path) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(GOOD))
    assert main(["x.yaml", "--dry-run"]) == 0
    assert [path.name for path in empty_folder.iterdir()] == ["x.yaml"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("metod", "grid", "metod: a sweep file has no such key; did you mean method?"),
        ("method", None, "'method' is a required property"),
        ("method", "bays", "method: 'bays' is not one of"),
        ("method", "custom", "method: custom needs a server"),
        ("name", 5, "name: 5 is not of type 'string'"),
        ("run_cap", 0, "run_cap: 0 is not a number of runs"),
        ("run_cap", True, "run_cap: True is not a number of runs"),
        ("run_cap", None, "never ends by itself; add --count 20, or run_cap: 20"),
        ("parameters", {}, "parameters"),
        ("parameters", [1], "parameters: [1] is not of type 'object'"),
        ("parameters/seed", 3, "parameters.seed: 3 is not a set of keys"),
        (
            "parameters/seed",
            {"valeus": [1]},
            "parameters.seed.valeus: a parameter has no such key; did you mean values?",
        ),
        ("parameters/seed", {"min": 3, "max": 2}, "min 3 is not less than max 2"),
        ("parameters/seed", {"min": 1, "max": "x"}, "parameters.seed"),
        ("parameters/seed", {"values": []}, "write value: X, values: [X, Y] or min: and max:"),
        ("parameters/sede", {"value": 1}, "parameters.sede: sede=1: there is no key sede; did you mean seed?"),
        ("parameters/seed", {"values": [1, "two"]}, "parameters.seed: seed=two: seed takes a whole number"),
        ("parameters/seed", {"min": 0.5, "max": 2.5}, "parameters.seed: seed=0.5"),
        ("parameters/seed", {"value": "1,2"}, "parameters.seed: seed=1,2: a run takes one value"),
        ("parameters/workload.system", {"value": "Be kind, and brief"}, """or "'Be kind, and brief'" for one text"""),
        ("parameters/drafter", {"values": ["eagle4"]}, "drafter has no option eagle4; did you mean eagle3?"),
        ("parameters/workload.limit", {"value": [None]}, "parameters.workload.limit: null is passed to a run as"),
        ("parameters/output_dir", {"value": "x"}, "parameters.output_dir: it cannot be chosen for one run"),
        ("parameters/hydra.mode", {"value": "RUN"}, "parameters.hydra.mode: it cannot be chosen for one run"),
        ("parameters/drafter", {"parameters": {"x": {"value": 1}}}, "parameters.drafter: nested parameters"),
        ("parameters/experiment", {"value": "drafters"}, "experiment=drafters is a sweep of its own"),
        ("parameters/sampling.temperature", {"distribution": "normal", "sigma": -1}, "parameters.sampling.temperature"),
        ("parameters/sampling.top_p", {"distribution": "log_uniform", "min": 1.0, "max": 900.0}, "parameters"),
        ("metric/name", "summary.speedupp", "metric.name: summary.json has no summary.speedupp; did you mean"),
        ("metric/name", "loss", "metric.name: summary.json has no loss"),
        ("metric/goal", "maximise", "metric.goal: 'maximise' is not one of"),
        ("metric/target", float("inf"), "metric.target: inf is not a finite number"),
        ("metric/gaol", "maximize", "gaol"),
        ("early_terminate", {"type": "hyperband"}, "early_terminate: a run reports its metric only once"),
        ("early_terminate", {"min_iter": 3}, "early_terminate: a run reports its metric only once"),
        ("command", None, "command: without it W&B passes --KEY=VALUE"),
        ("command", ["${env}", "python", "train.py", "${args}"], "command: it does not begin with"),
        ("command", COMMAND[:-1], "command: it must pass ${args_no_hyphens} once"),
        ("command", [*COMMAND, "-m"], "command: -m is not KEY=VALUE"),
        ("command", [*COMMAND, "seed=1"], "command: seed=1 is also among the parameters"),
        ("command", [*COMMAND, "batchsize=1"], "batchsize=1: there is no key batchsize; did you mean batch_size?"),
        ("command", [*COMMAND, "drafter=eagle3,ngram"], "command: drafter=eagle3,ngram has several values"),
    ],
)
def test_mistake_in_the_file_is_one_line_with_file_and_key(
    place: str, value: Any, message: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(changed(place, value)))
    line = refused_line(["x.yaml"], capsys)
    assert "x.yaml" in line
    assert message in line
    assert [path.name for path in empty_folder.iterdir()] == ["x.yaml"]


def test_a_sweep_is_not_typed_behind_the_file_of_another(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(GOOD))
    assert "experiment=pruning is a sweep" in refused_line(["x.yaml", "experiment=pruning"], capsys)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"min": 0, "max": 10**9}, "a grid of 2,000,000,002 runs"),
        ({"min": 0.0, "max": 1.0}, "seed=1e-06: seed takes a whole number"),
        (
            {"values": [1, 2], "probabilities": [0.5, 0.5]},
            "parameters.seed.probabilities: a grid uses every value once",
        ),
    ],
)
def test_grid_that_cannot_be_listed_is_refused(
    parameter: dict[str, Any], message: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(changed("parameters/seed", parameter) | {"method": "grid"}))
    assert message in refused_line(["x.yaml"], capsys)


def test_bayes_needs_a_metric_and_a_choice(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(changed("metric", None) | {"method": "bayes"}))
    assert "metric: method bayes needs one" in refused_line(["x.yaml"], capsys)
    Path("x.yaml").write_text(yaml.safe_dump(changed("parameters", {"seed": {"value": 1}}) | {"method": "bayes"}))
    assert "at least one searchable parameter" in refused_line(["x.yaml"], capsys)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=3"], "x.yaml sweeps seed"),
        (["drafter=eagle3,ngram"], "one value for all runs"),
        (["method=random"], "method is a key of the file; write it in"),
        (["batchsize=3"], "did you mean batch_size?"),
        (["dry_run=true"], "--dry-run instead"),
        (["fresh=true"], "--fresh instead"),
        (["--count", "0"], "--count: 0: use 1 or more"),
        (["--count", "x"], "--count: x: use 1 or more"),
        (["--seed", "1.5"], "--seed: 1.5: use 0 to"),
        (["--seed", "-1"], "--seed"),
        (["--cuont", "3"], "--cuont"),
        (["hydra/launcher=joblib"], "hydra/launcher=joblib: a search"),
    ],
)
def test_mistake_behind_the_file_is_one_line(
    overrides: list[str], message: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(GOOD))
    assert message in refused_line(["x.yaml", *overrides], capsys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "5",
        "- a",
        "a: &x [*x]",
        "&a [*a]",
        "{1: 2}",
        "a: 2020-13-45",
        "a: !!python/object:os.system x",
        "\0",
        "a: !!timestamp x",
        "a: !!bool x",
        "a: !!int ''",
        "a: !!int x",
        "[" * 5000,
    ],
)
def test_file_that_is_no_sweep_is_one_line(text: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(text)
    assert "x.yaml" in refused_line(["x.yaml"], capsys)


def test_file_that_cannot_be_read_is_one_line(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nope.yaml: cannot be read" in refused_line(["nope.yaml"], capsys)
    assert "cannot be read" in refused_line(["."], capsys)
    Path("x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "x.yaml: cannot be read" in refused_line(["x.yaml"], capsys)


def test_no_file_is_one_line(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "FILE" in refused_line([], capsys)


def test_overrides_and_flags_may_stand_in_any_order(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(GOOD))
    assert main(["x.yaml", "batch_size=2", "--dry-run", "repeats=1", "--count", "1"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith("batch_size=2 repeats=1")


def test_missing_search_code_is_one_line_with_the_command(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sweeps", None)
    Path("x.yaml").write_text(yaml.safe_dump(GOOD))
    assert "pip install -c constraints.txt -e '.[sweep]'" in refused_line(["x.yaml"], capsys)


SCALARS = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=6) | st.dates()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = ["/".join(place) for place in (
    ("method",), ("metric",), ("metric", "name"), ("metric", "goal"), ("metric", "target"), ("run_cap",), ("command",),
    ("parameters",), ("parameters", "seed"), ("parameters", "seed", "min"), ("parameters", "seed", "values"),
    ("parameters", "drafter.num_draft_tokens", "values"), ("parameters", "workload.limit"), ("early_terminate",),
    ("name",), ("controller",), ("anything",),
)]  # fmt: skip


@given(place=st.sampled_from(PLACES), value=VALUES, method=st.sampled_from(["grid", "random", "bayes"]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_anywhere_is_a_clean_preview_or_one_line(
    place: str, value: Any, method: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(place, "" if value is None else value)
    if place != "method":
        config["method"] = method
    check_clean_or_refused(yaml.safe_dump(config), capsys)


@given(at=st.integers(0, 400), text=st.text(max_size=3), length=st.integers(0, 5))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_the_text_is_a_clean_preview_or_one_line(
    at: int, text: str, length: int, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = yaml.safe_dump(GOOD)
    check_clean_or_refused(whole[:at] + text + whole[at + length :], capsys)


def check_clean_or_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    code = main(["x.yaml", "--dry-run"])
    captured = capsys.readouterr()
    assert code in (0, 2)
    refused = [line for line in captured.err.splitlines() if line.startswith("refused: ")]
    assert captured.err.splitlines() == refused
    assert bool(refused) == (code == 2)


def test_a_folder_of_sweep_files_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a clone without the extra, whose folder sweeps/ Python takes for a package."""
    for name in [name for name in sys.modules if name.startswith("sweeps.")]:
        monkeypatch.delitem(sys.modules, name)
    folder = ModuleType("sweeps")
    folder.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "sweeps", folder)
    with pytest.raises(UserError, match=r"W&B's search code .*sweeps\.config.*pip install"):
        load_library()
