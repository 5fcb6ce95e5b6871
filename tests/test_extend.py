"""The extension of docs/extend.md, written to a folder as it stands there: it runs, sweeps, reports and is examined."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_lab import extend
from spec_lab.__main__ import main
from spec_lab.app.compose import compose
from spec_lab.build.engine import build_prune_policy
from spec_lab.build.rules import build_rule
from spec_lab.build.workloads import load_requests
from spec_lab.collect.__main__ import main as collect
from spec_lab.config.checks import problems, said_by
from spec_lab.config.run import DrafterConfig, Run, WorkloadConfig
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.doctor.__main__ import main as examine
from spec_lab.engine.stopping_loop import collect_drafts
from spec_lab.menu import registry
from spec_lab.menu.extensions import find_extensions
from spec_lab.menu.option import (
    CatchupPruningOption,
    CheckerOption,
    DrafterOption,
    MetricOption,
    RuleOption,
    WorkloadOption,
)
from spec_lab.options.drafters.weights import ZOO
from spec_lab.record.metric import Measured, part_of
from spec_lab.record.reading import read_rounds, read_run
from spec_lab.record.summary import metric_of
from spec_lab.report import main as report
from spec_lab.study.frame import load_frame
from spec_lab.study.rescore import rescore
from spec_lab.workloads.tokenizer import IdsAlone, TargetTokenizer
from tests.fake_runs import FakeEngine
from tests.lab import generate, make_config
from tests.test_train_heads import write_texts
from tests.tiny_runs import make_runnable_pair, write_prompts

ROOT = Path(__file__).parents[1]
LAB = "extensions=[my_lab]"
CHEAP = [
    *("max_new_tokens=8", "repeats=1", "warmup_requests=0", "profile_rounds=0", "kernels=torch", "device=cpu"),
    *("references=[plain]", "workload.limit=2", "batch_size=2"),
]
NO_STATE: Any = None
needs_weights = pytest.mark.skipif(not ZOO.is_dir(), reason="this checkout has no shipped weights")


def write_extension(folder: Path) -> None:
    """Write the files of docs/extend.md: a block of code under each heading that names a file."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    found = re.findall(r"^## .*?`(my_lab/\S+)`\n(?:.*?)^```\w+\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 9
    for name, code in found:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code, encoding="utf-8")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that holds the extension, on the path of this process."""
    folder = tmp_path_factory.mktemp("lab")
    write_extension(folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def only_run(folder: Path) -> Path:
    [summary] = folder.rglob("summary.json")
    return summary.parent


def test_help_and_dry_run_show_what_was_added(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LAB, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Repeats the last token." in text
    assert "drafter.offset" in text
    assert re.search(r"prune\.catchup .*pre_attention, large_batches", text)
    assert main([LAB, "drafter=copycat", "acceptance=near", "prune=large_batches", "--dry-run"]) == 0
    assert "copycat-near-large_batches" in capsys.readouterr().out


def test_what_was_added_is_named_by_what_runs(lab: Path) -> None:
    knobs = ["drafter.offset=3", "acceptance.topk=4", "prune.catchup=large_batches", "prune.prefill=all_rows"]
    names = compose([LAB, "drafter=copycat", "acceptance=near", *knobs]).choices
    assert (names["drafter"], names["acceptance"]) == ("copycat+offset3", "near+topk4")
    assert names["prune"] in ("large_batches", "all_rows+large_batches")
    assert compose([LAB, "drafter=copycat", "drafter.offset=0"])[1]["drafter"] == "copycat"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter=copycat", "drafter.offset=1000"], "drafter.offset=1000 leaves the vocabulary"),
        (["drafter=copycat", "graph=round"], "drafter=copycat repeats a token"),
        (["acceptance=near", "sampling.temperature=1"], "acceptance=near ranks logits"),
        (["drafter=copycatt"], "did you mean copycat"),
        (["drafter=copycat", "drafter.ofset=3"], "did you mean drafter.offset"),
        (["prune.catchup=large_batch"], "did you mean large_batches"),
        (["acceptance=near", "acceptance.topk=two"], "a whole number"),
        (["acceptance=near", "drafter=eagle3", "drafter.stop=confidence"], "acceptance=near would not see"),
        (["drafter=copycat", "verify.budget=4"], "drafter=copycat records none"),
    ],
)
def test_what_was_added_is_refused_like_the_rest(
    overrides: list[str], said: str, lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([LAB, *overrides, "--dry-run"]) == 2
    output = capsys.readouterr()
    assert said in output.out + output.err


@needs_weights
def test_all_three_run_sweep_and_report(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ["-m", LAB, "drafter=copycat,eagle3", "acceptance=near", "prune=large_batches", *CHEAP, "references=[]"]
    assert main([*sweep, f"output_dir={tmp_path}"]) == 0
    summaries = [read_run(file.parent) for file in tmp_path.rglob("summary.json")]
    assert len(summaries) == 2
    for summary in summaries:
        assert summary.status == "finished"
        assert summary.choices["prune"] == "large_batches"
        assert summary.machine.extensions == {"my_lab": {"version": "0.3", "revision": None}}
        assert summary["divergence.bugs"] == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(lab)])
    monkeypatch.setitem(sys.modules, "my_lab", None)  # any import of it fails from here on
    assert report([str(tmp_path)]) == 0
    assert "copycat" in capsys.readouterr().out


@needs_weights
def test_metrics_and_a_stage_that_were_added_go_the_whole_way(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([LAB, "drafter=copycat", *CHEAP, f"output_dir={tmp_path}"]) == 0
    assert "longest_output" in capsys.readouterr().out
    folder = only_run(tmp_path)
    summary = read_run(folder)
    per_round = [row.metrics["all_kept"] for row in read_rounds(folder)]
    assert summary["metrics.all_kept"] == pytest.approx(sum(map(float, per_round)) / len(per_round))
    assert summary["metrics.longest_output"] == summary.references["plain"]["metrics.longest_output"] == 8
    assert summary.definitions["metrics.longest_output"] == "Tokens of the longest output."
    stages = summary.under("stage_ms_per_round")
    assert 0 < (stages["look_back"] or 0) < (stages["catchup"] or 0)
    frame = load_frame(tmp_path)
    assert frame["metrics.longest_output"].tolist() == [8.0, 8.0]
    assert frame["stage_ms_per_round.look_back"].notna().tolist()[0]
    assert summary.scalars()["summary.metrics.longest_output"] == 8.0


def test_a_metric_that_fails_has_no_value_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    fails = MetricOption(name="broken", definition="x", of_round=lambda record: record.nothing)
    infinite = MetricOption(name="infinite", definition="x", of_run=lambda result: float("inf"))
    result = FakeEngine(3, {}).generate(2)
    part = part_of(Measured((), [result]), [metric_of(fails), metric_of(infinite)])
    assert part.under("metrics") == {"broken": None, "infinite": None}
    assert "metric metrics.broken has no value" in capsys.readouterr().err


@needs_weights
def test_the_doctor_examines_a_drafter_that_was_added(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine([LAB, "drafter=copycat", "kernels=torch", "workload.limit=2", "max_new_tokens=12"]) == 0
    assert "drafter=copycat has no weights" in capsys.readouterr().out


@needs_weights
def test_a_rule_that_returns_nothing_is_named(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("my_lab.parts.Near.accept", lambda rule, inputs: None)
    assert main([LAB, "acceptance=near", *CHEAP, f"output_dir={tmp_path}"]) == 1
    assert "acceptance: Near.accept returns NoneType; return what spec_lab.extend.emit" in capsys.readouterr().err


@needs_weights
def test_a_drafter_that_returns_no_state_is_named(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("my_lab.parts.Copycat.ingest", lambda drafter, given: None)
    assert main([LAB, "drafter=copycat", *CHEAP, f"output_dir={tmp_path}"]) == 1
    assert "Copycat.ingest returns None where prompts end" in capsys.readouterr().err


def test_a_drafter_that_returns_nothing_is_named() -> None:
    drafter: Any = SimpleNamespace(num_draft_tokens=1)
    with pytest.raises(UserError, match=r"returns NoneType; return a state whose `tokens` \[batch\]"):
        collect_drafts(drafter, drafter, NO_STATE)
    state: Any = SimpleNamespace(tokens=torch.zeros(2, 4))
    with pytest.raises(UserError, match="returns tokens of 2 dimensions"):
        collect_drafts(drafter, drafter, state)


def test_a_draft_outside_the_vocabulary_is_named(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(drafter: object, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(tokens=tokens + 10**6, attention=None)

    monkeypatch.setattr("my_lab.parts.Copycat._start", start)
    monkeypatch.setattr("my_lab.parts.Copycat.step", lambda drafter, state, step: None)
    assert main([LAB, "drafter=copycat", *CHEAP, f"output_dir={tmp_path}"]) == 1
    assert "failed: drafter: Copycat drafts the token 100" in capsys.readouterr().err


@needs_weights
def test_a_rule_that_was_added_judges_a_recorded_run_again(lab: Path, tmp_path: Path) -> None:
    recorded = [LAB, "drafter=eagle3", "acceptance=near", "record.topk=4", *CHEAP, f"output_dir={tmp_path}"]
    assert main(recorded) == 0
    config = compose([LAB, "acceptance=near"]).config
    again = rescore(only_run(tmp_path), config.acceptance, config.extensions)
    narrow = compose([LAB, "acceptance=near", "acceptance.topk=1"]).config
    strict = rescore(only_run(tmp_path), narrow.acceptance, config.extensions)
    assert sum(map(sum, again.values())) >= sum(map(sum, strict.values()))
    with pytest.raises(UserError, match=r"acceptance=near: nothing builds it"):
        rescore(only_run(tmp_path), config.acceptance)


def test_a_head_learns_on_collected_states_and_drafts_in_parallel(lab: Path, tmp_path: Path) -> None:
    """A chain, the same one pruned and captured, and a tree, whose drafts are those of the chain and more."""
    pair = make_runnable_pair(tmp_path, num_hidden_layers=8)
    texts, tokenizer = ["abcab", "xyyx"], TargetTokenizer(pair[0])
    requests = [Request(text, "x", tuple(tokenizer.encode_prompt("continue", text)), 40) for text in texts]
    written = generate(make_config(pair, "none", batch_size=2), requests)
    write_texts(pair[0], tmp_path / "texts", [[*each.prompt_ids, *written[each.request_id]] for each in requests])
    at = ["target=hf", f"target.path={pair[0]}"]
    assert collect([*at, f"texts={tmp_path / 'texts'}", f"output_dir={tmp_path / 'states'}", "device=cpu"]) == 0
    import_module("my_lab.train").main(pair[0], tmp_path / "states", tmp_path / "head", 120)
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": text, "form": "continue"} for text in texts])
    run = [LAB, *at, "drafter=glance", f"drafter.path={tmp_path / 'head'}", *CHEAP, "max_new_tokens=16"]
    run += ["workload=jsonl", f"workload.path={prompts}", "num_threads=1"]
    accepted = {}
    for name, more in {"chain": [], "pruned": ["prune=catchup", "graph=round"], "tree": ["tree=dynamic"]}.items():
        assert main([*run, *more, f"output_dir={tmp_path / name}"]) == 0
        summary = read_run(only_run(tmp_path / name))
        assert summary["divergence.bugs"] == 0
        accepted[name] = summary["acceptance_length"]
    assert accepted["pruned"] == accepted["chain"] <= accepted["tree"] and accepted["tree"] > 1.2


def test_a_workload_that_was_added_is_read_by_a_checker_that_was_added(lab: Path) -> None:
    registered = registry.load(("my_lab",))
    config = compose([LAB, "workload=count_down", "workload.limit=2"]).config
    option = registered.find(WorkloadOption, config.workload.name)
    requests = option.load(config, SimpleNamespace(encode_prompt=lambda form, text, system: [len(text)]))
    checker = registered.find(CheckerOption, config.workload.checker)
    assert [request.request_id for request in requests] == ["from-3", "from-4"]
    assert checker.same(requests[0].answer, checker.read("3, 2, 1.") or "") and checker.read(" ") is None


TRAITS = """
from dataclasses import dataclass
from spec_lab.extend import AcceptanceConfig, DrafterConfig, DrafterOption, RuleOption

@dataclass
class ReplayConfig(DrafterConfig):
    name: str = "replay"

@dataclass
class SilentConfig(DrafterConfig):
    name: str = "silent"

@dataclass
class ExactConfig(AcceptanceConfig):
    name: str = "exact"

def register(registry):
    nowhere = print
    registry.add(
        DrafterOption(name="replay", schema=ReplayConfig, load=nowhere, follows_greedy_text="replays a text"),
        DrafterOption(name="silent", schema=SilentConfig, load=nowhere, drafts=False),
        RuleOption(name="exact", schema=ExactConfig, judge=nowhere, keeps_greedy_text=True),
    )
"""


@pytest.mark.parametrize(
    ("drafter", "num_draft_tokens", "rule", "overrides", "said"),
    [
        ("oracle", 3, "exact", [], []),
        ("replay", 3, "strict", [], []),
        ("replay", 3, "exact", [], []),
        ("replay", 3, "relaxed_thinking", [], ["drafter=replay replays a text, but acceptance=relaxed_thinking"]),
        ("replay", 3, "exact", ["sampling.temperature=1"], ["drafter=replay replays a text, but sampling.temp"]),
        ("silent", 0, "exact", [], []),
        ("replay", 0, "exact", [], ["drafter=replay with drafter.num_draft_tokens=0 drafts nothing"]),
    ],
)
def test_traits_of_an_added_row_are_asked_as_those_of_any(
    drafter: str,
    num_draft_tokens: int,
    rule: str,
    overrides: list[str],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No drafter and no rule is asked for by its name."""
    (tmp_path / "traits_lab.py").write_text(TRAITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = compose([f"acceptance={rule}" if rule != "exact" else "acceptance=strict", *overrides]).config
    config.extensions = ["traits_lab"]
    rows = registry.load(config.extensions)
    config.drafter = rows.find(DrafterOption, drafter).schema(num_draft_tokens=num_draft_tokens)
    config.acceptance = rows.find(RuleOption, rule).schema()
    found = list(problems(config))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_the_refusals_of_an_added_checker_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "workload.checker=picky takes nothing; use workload.checker=answer"
    (tmp_path / "picky_lab.py").write_text(
        "from spec_lab.extend import CheckerOption\ndef register(registry):\n"
        f"    registry.add(CheckerOption(name='picky', read=str, same=str, refusals=(lambda config: {said!r},)))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(problems(compose(["extensions=[picky_lab]", "workload.checker=picky"]).config)) == [said]


def test_a_name_that_nothing_builds_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A YAML alone, which Hydra would take from `--config-dir`."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.yaml").write_text(
        "# python -m spec_lab drafter=mine\n# Mine.\n"
        "defaults:\n  - /schema/drafter/random@_here_\n  - _self_\n\nname: mine\n"
    )
    for flags in (["--dry-run"], [f"output_dir={tmp_path / 'out'}"]):
        assert main(["--config-dir", str(tmp_path), "drafter=mine", *flags]) == 2
        output = capsys.readouterr()
        assert "drafter=mine: nothing builds it" in output.out + output.err
        assert "extensions=[MODULE]" in output.out + output.err
    assert not (tmp_path / "out").exists()


def test_the_yaml_of_an_extension_that_is_not_named_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its schema is registered by nothing, so that Hydra cannot compose it."""
    (tmp_path / "drafter").mkdir()
    text = "defaults:\n  - /schema/drafter/unnamed@_here_\n  - _self_\n"
    (tmp_path / "drafter" / "unnamed.yaml").write_text(text)
    for flags in (["--dry-run"], [f"output_dir={tmp_path / 'out'}"], ["-m", f"output_dir={tmp_path / 'out'}"]):
        assert main(["--config-dir", str(tmp_path), "drafter=unnamed", *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith("refused: drafter=unnamed: its schema")
        assert error.count("\n") == 1
        assert "extensions=[MODULE]" in error
    assert not (tmp_path / "out").exists()


def test_the_name_of_a_part_of_an_option_is_not_said_to_be_a_name_in_a_file() -> None:
    config = compose().config
    config.prune.catchup = "mine"
    [refusal] = list(problems(config))
    assert "use one of none, post_attention, pre_attention, or name the module" in refusal


@pytest.mark.parametrize(("knob", "value"), [("acceptance", "mine"), ("graph", "mine"), ("workload", "mine")])
def test_every_kind_of_name_that_nothing_builds_is_refused(knob: str, value: str) -> None:
    config = compose().config
    getattr(config, knob).name = value
    [refusal] = list(problems(config))
    assert refusal.startswith(f"{knob}={value}: nothing builds it; use one of ")


FOUND_TOO_LATE = (
    "extensions is read before anything is composed: type extensions=[my_lab] on the command line, or install it with "
    "the entry point group spec_lab.extensions"
)
WRITTEN = {
    "set": "extensions: [my_lab]\n",
    "chooses_its_option": "defaults:\n  - override /drafter: copycat\nextensions: [my_lab]\n",
    "sets_its_knob": "extensions: [my_lab]\ndrafter:\n  offset: 3\n",
    "swept": "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      extensions: '[my_lab]'\n",
}


@pytest.fixture
def written(lab: Path, tmp_path: Path) -> Path:
    """A folder with experiments that name the extension in their YAML."""
    (tmp_path / "experiment").mkdir()
    for name, text in WRITTEN.items():
        comments = f"# @package _global_\n# python -m spec_lab experiment={name}\n# Theirs.\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(comments + text)
    return tmp_path


@pytest.mark.parametrize("experiment", WRITTEN)
def test_an_extension_that_only_a_file_names_is_refused(
    experiment: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config-dir", str(written), f"experiment={experiment}", "--dry-run"]) == 2
    assert capsys.readouterr().err == f"refused: {FOUND_TOO_LATE}\n"


@pytest.mark.parametrize("experiment", ["chooses_its_option"])
def test_an_extension_that_only_a_file_names_is_refused_without_a_command_line(experiment: str, written: Path) -> None:
    with pytest.raises(UserError, match=re.escape(FOUND_TOO_LATE)):
        compose([f"hydra.searchpath=[{written.as_uri()!r}]", f"experiment={experiment}"])


def test_an_experiment_may_choose_an_option_of_an_extension_that_is_typed(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search path has both: the folder that was typed, and that of the extension."""
    typed = [f"hydra.searchpath=[{written.as_uri()!r}]", LAB, "experiment=chooses_its_option"]
    run_ = compose(typed)
    config, choices = run_.config, run_.choices
    assert (config.drafter.name, choices["drafter"]) == ("copycat", "copycat")
    assert main([*typed, "--dry-run"]) == 0
    assert "drafter     copycat" in capsys.readouterr().out


def test_an_extension_that_is_typed_may_stand_in_a_file_too(written: Path) -> None:
    assert main(["--config-dir", str(written), "experiment=set", LAB, "drafter=copycat", "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["drafter=copycat"], "it takes one of eagle3"),
        (["acceptance=near"], "it takes one of strict"),
        (["acceptance=strickt"], "did you mean strict?"),
        (["prune=large_batches"], "it takes one of none"),
        (["prune.catchup=large_batches"], "it takes none, post_attention"),
    ],
)
def test_an_option_that_may_be_an_extensions_is_refused_with_what_to_do(arguments: list[str], hint: str) -> None:
    with pytest.raises(UserError, match=r"[;?] [aA]n extension's options need extensions=\[MODULE\]") as refused:
        compose(arguments)
    group = arguments[0].partition("=")[0]
    assert (f"a file conf/{group}/OPTION.yaml" in str(refused.value)) == ("." not in group)
    assert hint in str(refused.value)
    assert "\n" not in str(refused.value)


def nothing(*arguments: object) -> None:
    """What a function without a return makes."""


NO_BUILD: Any = None


@pytest.mark.parametrize(
    ("part", "row", "make"),
    [
        ("rule", {"judge": nothing}, lambda chosen: build_rule(chosen, NO_BUILD)),
        ("prefill", {"make": nothing}, build_prune_policy),
        ("catchup", {"make": nothing}, build_prune_policy),
        ("drafter", {"load": nothing}, lambda chosen: load_drafter(chosen, NO_BUILD)),
    ],
)
def test_a_function_that_makes_nothing_is_refused(part: str, row: dict[str, Any], make: Callable[[Any], Any]) -> None:
    chosen = compose([]).config
    broken = replace(chosen, **{part: replace(getattr(chosen, part), **row)})
    with pytest.raises(UserError, match=rf"{next(iter(row))} of its row returned None; return"):
        make(broken)


@pytest.mark.parametrize("argument", ["sampling=near", "references=[near]"])
def test_what_no_extension_adds_is_refused_without_it(argument: str) -> None:
    with pytest.raises(UserError) as refused:
        compose([argument])
    assert "extensions" not in str(refused.value)


BROKEN = {
    "no_such_module": (None, "there is no module no_such_module"),
    "lost.py": (None, "there is no module lost.py; name it without .py, as in extensions=[lost]"),
    "no_function": ("", "no_function has no function register(registry)"),
    "fails_to_load": ("import nothing_of_that_name", "fails_to_load cannot be imported"),
    "leaves": ("import sys\nsys.exit(3)", "leaves cannot be imported (SystemExit: 3); it must not end"),
    "closes": ("raise GeneratorExit", "closes cannot be imported (GeneratorExit"),
    "is_async": ("async def register(registry):\n    pass", "is_async.register is async, but is not awaited"),
    "returns": ("def register(registry):\n    return [1]", "returns.register returns list, which nobody reads"),
    "leaves_later": ("def register(registry):\n    raise SystemExit", "leaves_later.register fails (SystemExit"),
    "../x": (None, "'../x' is not the name of a module; write it as an import does"),
    ".my_lab": (None, "'.my_lab' is not the name of a module"),
    "bad_syntax": ("def", "bad_syntax cannot be imported"),
    "fails": ("def register(registry):\n    raise KeyError('x')", "fails.register fails (KeyError"),
    "leads_elsewhere": (
        "from spec_lab.menu.option import CheckerOption\n"
        "def register(registry):\n    registry.add(CheckerOption(name='../x', read=str, same=str))",
        "workload.checker='../x' cannot be typed, but it also names folders; use a plain word",
    ),
    "twice": (
        "from spec_lab.options import pruning\ndef register(registry):\n    registry.add(*pruning.ROWS[2:])",
        "prune.catchup=none is registered twice",
    ),
    "walks_off": ("import os\nos.chdir('..')", "walks_off changes the working folder"),
    "walks_off_later": ("import os\ndef register(registry):\n    os.chdir('/')", "changes the working folder"),
    "no_row": ("def register(registry):\n    registry.add('mine')", "'mine' is not a row of an option"),
    "no_call": (
        "from spec_lab.extend import RuleOption\ndef register(registry):\n    registry.add(RuleOption)",
        "add a row such as RuleOption(name=...)",
    ),
    "no_schema": (
        "from spec_lab.extend import DrafterOption\n"
        "def register(registry):\n    registry.add(DrafterOption(name='mine', schema=dict, load=len))",
        "drafter=mine: its schema must be a dataclass derived from DrafterConfig, not <class 'dict'>",
    ),
    "no_dataclass": (
        "from spec_lab.extend import DrafterConfig, DrafterOption\n"
        "class Mine(DrafterConfig):\n    name: str = 'mine'\n"
        "def register(registry):\n    registry.add(DrafterOption(name='mine', schema=Mine, load=len))",
        "drafter=mine: the fields of its schema are not read; write @dataclass above class Mine",
    ),
    "no_function_of_a_metric": (
        "from spec_lab.extend import MetricOption\n"
        "def register(registry):\n    registry.add(MetricOption(name='mine', definition='A number.'))",
        "metric=mine: nothing computes it; give it a function, such as of_round or of_run",
    ),
    "no_definition": (
        "from spec_lab.extend import MetricOption\n"
        "def register(registry):\n    registry.add(MetricOption(name='mine', definition=' ', of_run=len))",
        "metric=mine: its definition is empty",
    ),
    "no_refusals": (
        "from spec_lab.extend import CatchupPruningOption\n"
        "def register(registry):\n    registry.add(CatchupPruningOption(name='mine', make=len, refusals=len))",
        "prune.catchup=mine: its refusals must be a tuple of functions",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_extension_is_refused_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = BROKEN[name]
    if code is not None:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([f"extensions=[{name}]", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_key_without_a_text_for_help_is_refused_with_the_line_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = tmp_path / "wordless_lab" / "conf" / "drafter"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("# a\n# b\ndefaults:\n  - /schema/drafter/mine@_here_\n  - _self_\n")
    (tmp_path / "wordless_lab" / "__init__.py").write_text(
        "from dataclasses import dataclass\nfrom spec_lab.extend import DrafterConfig, DrafterOption\n"
        "@dataclass\nclass Mine(DrafterConfig):\n    name: str = 'mine'\n    gain: float = 1.0\n"
        "def register(registry):\n    registry.add(DrafterOption(name='mine', schema=Mine, load=len))"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["extensions=[wordless_lab]", "--dry-run"]) == 2
    said = "refused: drafter.gain: no class says what it is; in class Mine write gain: TYPE = knob("
    assert capsys.readouterr().err.startswith(said)


def test_ctrl_c_while_an_extension_is_imported_ends_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_lab.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["extensions=[slow_lab]", "--dry-run"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("typed", ["extensions=my_lab", "extensions=[1]", "extensions=[a],[b]", "extensions={a:1}"])
def test_extensions_are_a_list_of_names(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "--dry-run"]) == 2
    assert "write extensions=[my_lab]" in capsys.readouterr().err


def test_an_extension_adds_to_its_own_registry_alone(lab: Path) -> None:
    with_it, without = registry.load(("my_lab",)), registry.load()
    for kind, name in ((DrafterOption, "copycat"), (RuleOption, "near"), (CatchupPruningOption, "large_batches")):
        assert name in with_it.options(kind)
        assert name not in without.options(kind)
    assert find_extensions(["my_lab", "my_lab"])[0].conf == (lab / "my_lab" / "conf").resolve()


def test_an_installed_extension_needs_not_be_named(tmp_path: Path) -> None:
    write_extension(tmp_path)
    installed = tmp_path / "my_lab-0.4.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 0.4\n")
    (installed / "top_level.txt").write_text("my_lab\n")
    (installed / "entry_points.txt").write_text("[spec_lab.extensions]\nmy_lab = my_lab\n")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(tmp_path)])
    code = (
        "import sys; from spec_lab.__main__ import main; from spec_lab.menu import registry; "
        "code = main(['drafter=copycat', '--dry-run']); print(registry.load().origins()); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'version': '0.4'" in done.stdout


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: [1], "request 0 is 1, no Request"),
        (lambda: [Request("", "c", (5,), 4)], "request_id=''"),
        (lambda: [Request("a", None, (5,), 4)], "category=None"),  # type: ignore[arg-type]
        (lambda: [Request("a", "c", (5, -1), 4)], "-1 in prompt_ids"),
        (lambda: [Request("a", "c", (5.5,), 4)], r"5\.5 in prompt_ids"),  # type: ignore[arg-type]
        (lambda: [Request("a", "c", tuple(np.array([5])), 4)], "int64.* in prompt_ids"),
        (lambda: [Request("a", "c", (5,), 4.0)], r"4\.0 in max_new_tokens"),  # type: ignore[arg-type]
        (lambda: [Request("a", "c", (5,), 4, answer=7)], "answer=7, which must be a text, or"),  # type: ignore[arg-type]
        (lambda: None, "workload=mine is empty; check workload.categories$"),
        (lambda: [Request(name, "c", (5,), 4) for name in "abc"], "workload.limit=2: workload=mine loads 3 requests"),
        (lambda: [Request("a", "d", (5,), 4)], r"workload.categories=\[c\]: workload=mine loads one of d"),
    ],
)
def test_a_request_that_a_workload_got_wrong_is_refused(made: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_requests(chosen_with(made), IdsAlone(9))


def test_an_empty_workload_without_categories_is_its_rows() -> None:
    chosen = chosen_with(list)
    chosen.workload.categories = None
    with pytest.raises(UserError, match=r"is empty; check what the `load` of its row returns$"):
        load_requests(chosen, IdsAlone(9))


def test_a_workload_may_make_its_requests_one_after_the_other() -> None:
    requests = load_requests(chosen_with(lambda: (Request(str(i), "c", (5,), 4) for i in range(2))), IdsAlone(9))
    assert [request.request_id for request in requests] == ["0", "1"]


def test_a_refusal_that_says_nothing_in_words_is_refused() -> None:
    row = CatchupPruningOption(name="mine", make=len, refusals=(lambda config: 5,))  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match=r"prune\.catchup=mine: a refusal of its row returned 5; return None"):
        said_by(row, row.refusals[0], Run())


def test_a_schema_with_the_name_of_another_option_is_refused_with_the_one_to_write() -> None:
    @dataclass
    class Other(DrafterConfig):
        name: str = "other"

    registered = registry.Registry()
    registered.add(DrafterOption(name="mine", schema=Other, load=len))
    with pytest.raises(UserError, match='drafter=mine: its schema has the name other; write name: str = "mine"'):
        registered.find(DrafterOption, "other")


def chosen_with(made: Callable[[], Any]) -> Any:
    row = SimpleNamespace(name="mine", load=lambda config, tokenizer: made())
    config = SimpleNamespace(workload=WorkloadConfig("mine", limit=2, categories=["c"]))
    return SimpleNamespace(workload=row, config=config, registry=registry.load(()))


def test_an_extension_may_import_all_that_is_named_and_no_name_is_named_twice() -> None:
    """What a type checker sees and what is imported when it is asked for are the same names."""
    assert extend.__file__ is not None
    tree = ast.parse(Path(extend.__file__).read_text())
    [seen] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        (node.module, alias.name) for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == {(module, name) for module, names in extend.WITH_TORCH.items() for name in names}
    for module, name in typed:
        assert getattr(extend, name) is getattr(import_module(str(module)), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        extend.no_such_name  # noqa: B018
