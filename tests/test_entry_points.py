"""Whatever is typed, and whatever stands in a file: every program runs cleanly, or says a line and ends with code 2.

SPEC_LAB_EXAMPLES=2000 throws so many at each case, other ones each time; without it the same few are thrown.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

import spec_lab.doctor.__main__ as doctor
from spec_lab.__main__ import main as run
from spec_lab.program.options import Menu, read_groups, read_keys, run_menu
from spec_lab.report.__main__ import main as report
from spec_lab.rescore.__main__ import main as rescore
from spec_lab.sweep.__main__ import main as sweep
from tests.damage import TYPED, damaged
from tests.fake_runner import FakeRunner
from tests.test_study import DELTA, STRICT, FakeRun
from tests.test_sweep_refusals import GOOD
from tests.tiny_runs import make_runnable_pair, write_prompts

Main = Callable[[Sequence[str]], int]
EXAMPLES = int(os.environ.get("SPEC_LAB_EXAMPLES", "0"))
CHEAP = (
    *("max_new_tokens=3", "repeats=1", "warmup_requests=0", "profile_rounds=0", "num_threads=1", "device=cpu"),
    *("references=[]", "workload.limit=1", "record.topk=2", "cache.prefill_chunk=16"),
)
OF_A_REPORT = ("left out", "nothing is compared", "not compared", "plot not")
OPTION = """\
# python -m spec_lab drafter=mine
# an option in a folder of its own
defaults:
  - /schema/drafter/{schema}
  - _self_
num_draft_tokens: 2
{knob}: 4
"""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended, and what it left in the folder it was called in."""

    code: int
    errors: list[str]
    left: list[Path]


@contextmanager
def in_a_place_of_its_own(base: Path) -> Iterator[Path]:
    """A working directory and a home that are empty, so deep that `../../x` is in `base` too."""
    with pytest.MonkeyPatch.context() as patch:
        deep = base / "a" / "b" / "c"
        deep.mkdir(parents=True)
        patch.chdir(deep)
        patch.setenv("HOME", str(base / "home"))  # W&B keeps a log there, whoever asks it for a key
        yield base / "a"
    shutil.rmtree(base)


def ended(main: Main, arguments: Sequence[str], base: Path) -> Ending:
    """How `main` ends, called in a folder below `base`."""
    with in_a_place_of_its_own(base / "place") as place:
        before = set(place.rglob("*"))
        errors = StringIO()
        with redirect_stdout(StringIO()), redirect_stderr(errors):
            try:
                code = main(arguments)
            except SystemExit as end:  # argparse's --help
                code = int(end.code or 0)
        return Ending(code, errors.getvalue().splitlines(), sorted(set(place.rglob("*")) - before))


def judge(ending: Ending) -> None:
    """A clean end, or one line, exit code 2 and nothing left."""
    assert ending.code in (0, 2), ending
    assert not any("Traceback" in line for line in ending.errors), ending
    if ending.code == 2:
        assert len(ending.errors) == 1 and ending.errors[0].startswith("refused: "), ending
        assert ending.errors[0].isprintable(), ending
        assert ending.left == [], ending


def judge_report(ending: Ending) -> None:
    """A line for everything that is left out, and code 2 where nothing is shown."""
    assert ending.code in (0, 2), ending
    assert ending.code == 0 or ending.errors, ending
    assert all(line.startswith(OF_A_REPORT) and line.isprintable() for line in ending.errors), ending


def judge_findings(ending: Ending) -> None:
    """The doctor's exit code 1 says that it has found a fault, on standard output."""
    if ending.code == 1:
        assert not any("Traceback" in line or line.startswith("failed") for line in ending.errors), ending
    else:
        judge(ending)


def of_models(lab: Path) -> list[str]:
    return ["target=hf", f"target.path={lab / 'target'}", "drafter=eagle3", f"drafter.path={lab / 'head'}"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One of every file that a program reads."""
    base = tmp_path_factory.mktemp("lab")
    target, _ = make_runnable_pair(base, num_hidden_layers=8)
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    rows = [{"id": f"p{index}", "category": "c", "prompt": "AB"} for index in range(2)]
    write_prompts(base / "prompts.jsonl", rows)
    write_prompts(base / "bench.jsonl", [{"question_id": index, "category": "c", "turns": ["A"]} for index in range(2)])
    (base / "sweep.yaml").write_text(json.dumps(GOOD))
    workload = ["workload=jsonl", f"workload.path={base / 'prompts.jsonl'}", f"output_dir={base}"]
    assert run([*of_models(base), *workload, *CHEAP]) == 0
    next(base.glob("run-*")).rename(base / "kept")
    FakeRun(STRICT, 3, [2, 2, 1], num_requests=4).record(base / "study" / "strict")
    FakeRun(DELTA, 3, [3, 2, 1], num_requests=4, minute=1).record(base / "study" / "delta")
    (base / "study" / "sweep.json").write_text('{"jobs": 2, "finished": 2}')
    for group, schema, knob in (("extra", "ngram", "max_ngram"),):
        (base / group / "drafter").mkdir(parents=True)
        (base / group / "drafter" / "mine.yaml").write_text(OPTION.format(schema=schema, knob=knob))
    (base / "path" / "fuzzed_lab" / "conf" / "drafter").mkdir(parents=True)
    (base / "path" / "fuzzed_lab" / "__init__.py").write_text("def register(registry):\n    pass\n")
    option = OPTION.format(schema="ngram", knob="max_ngram")
    (base / "path" / "fuzzed_lab" / "conf" / "drafter" / "mine.yaml").write_text(option)
    sys.path.insert(0, str(base / "path"))
    yield base
    sys.path.remove(str(base / "path"))


@pytest.fixture
def stubbed(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded, decoded or examined."""
    monkeypatch.setattr("spec_lab.doctor.subject.load_subject", lambda chosen: None)
    monkeypatch.setattr("spec_lab.doctor.examine.examine", lambda subject: [])
    monkeypatch.setattr("spec_lab.doctor.report.format_findings", str)


def throw(check: Callable[[st.DataObject], None], examples: int) -> None:
    """Throw other examples at each case. The first is the simplest of all: where one is thrown, it is the second."""
    thrown = []

    def throw_one(number: int, data: st.DataObject) -> None:
        if number or examples > 1:
            thrown.append(number)
            check(data)

    few = settings(
        max_examples=EXAMPLES or max(2, examples),
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    test = few(given(st.integers(0, 99), st.data())(throw_one))
    of_case = crc32(os.environ["PYTEST_CURRENT_TEST"].encode())
    (test if EXAMPLES else seed(of_case)(test))()
    assert thrown


def knobs(menu: Menu, data: st.DataObject) -> list[str]:
    """One key of the menu or two, each with anything behind it, and the options that read them."""
    names = sorted(menu.keys.keys() - {"dry_run"})  # which prints what it refuses with all the rest
    keys = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    options = {}
    for key in keys:
        owners = [owner for owner in menu.keys[key].defaults if owner]
        if owners and data.draw(st.integers(0, 3)):
            options[key.partition(".")[0]] = data.draw(st.sampled_from(owners))
    typed = {key: data.draw(TYPED) for key in keys}
    assume(not typed.get("output_dir", "").lstrip("'\" ").startswith("/"))
    return [f"{key}={value}" for key, value in {**options, **typed}.items()]


def with_knobs(main: Main, menu: Callable[[], Menu], lab: Path, base: Path, data: st.DataObject) -> None:
    judge(ended(main, knobs(menu(), data), base))


def knobs_of_a_sweep(lab: Path, base: Path, data: st.DataObject) -> None:
    """As typed behind the file, for the first run that the sweep proposes."""
    judge(ended(sweep, [str(lab / "sweep.yaml"), *knobs(run_menu(), data), "--dry-run", "--count", "1"], base))


def knobs_of_rules(lab: Path, base: Path, data: st.DataObject) -> None:
    rules = [key for key in run_menu().keys if key.startswith("acceptance.")]
    rule = data.draw(st.sampled_from(["acceptance=strict", "acceptance=relaxed_thinking", "acceptance=rejection"]))
    typed = data.draw(st.dictionaries(st.sampled_from(rules), TYPED, max_size=2))
    texts = [rule, *(f"{key}={value}" for key, value in typed.items())]
    judge(ended(rescore, [str(lab / "kept"), *texts], base))


def flags_of_the_report(lab: Path, base: Path, data: st.DataObject) -> None:
    ending = ended(report, [data.draw(st.sampled_from(["--last=", "--", "x"])) + data.draw(TYPED)], base)
    judge(ending) if any(line.startswith("refused") for line in ending.errors) else judge_report(ending)


def any_text(main: Main, lab: Path, base: Path, data: st.DataObject) -> None:
    """As the only argument, whole or in two."""
    texts = data.draw(st.lists(TYPED.filter(lambda text: not text.startswith("/")), min_size=1, max_size=2))
    assume(main is not report or not any(text.startswith((".", "~")) for text in texts))
    ending = ended(main, texts, base)
    judge_report(ending) if main is report and not ending.errors[0].startswith("refused") else judge(ending)


TYPED_AT: Mapping[str, Callable[[Path, Path, st.DataObject], None]] = {
    "knobs of a run": partial(with_knobs, run, run_menu),
    "knobs of the doctor": partial(with_knobs, doctor.main, run_menu),
    "knobs of a sweep": knobs_of_a_sweep,
    "knobs of rules": knobs_of_rules,
    "flags of the report": flags_of_the_report,
    **{
        f"any text for {name}": partial(any_text, main)
        for name, main in {
            "a run": run, "the doctor": doctor.main, "a sweep": sweep, "rules": rescore,
            "the report": report,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", TYPED_AT)
@pytest.mark.usefixtures("stubbed")
def test_anything_may_be_typed(case: str, lab: Path, tmp_path: Path) -> None:
    throw(lambda data: TYPED_AT[case](lab, tmp_path, data), 2)


def own_option(main: Main, folder: str, lab: Path, base: Path, data: st.DataObject) -> None:
    """A YAML file in a folder that --config-dir names."""
    with damaged(lab / folder / "drafter" / "mine.yaml", data):
        judge(ended(main, ["--config-dir", str(lab / folder), "drafter=mine"], base))


def option_of_an_extension(main: Main, before: Sequence[str], lab: Path, base: Path, data: st.DataObject) -> None:
    with damaged(lab / "path" / "fuzzed_lab" / "conf" / "drafter" / "mine.yaml", data):
        read_groups.cache_clear()
        read_keys.cache_clear()
        arguments = [str(lab / text) if text.endswith(".yaml") else text for text in before]
        judge(ended(main, [*arguments, "extensions=[fuzzed_lab]", "drafter=mine"], base))


def sweep_file(lab: Path, base: Path, data: st.DataObject) -> None:
    with damaged(lab / "sweep.yaml", data):
        judge(ended(sweep, [str(lab / "sweep.yaml"), "--dry-run", "--count", "1"], base))


YAML = {
    "option of a run": partial(own_option, run, "extra"),
    "extension of a run": partial(option_of_an_extension, run, ()),
    "extension in the doctor": partial(option_of_an_extension, doctor.main, ()),
    "extension of a sweep": partial(option_of_an_extension, sweep, ("sweep.yaml", "--dry-run", "--count", "1")),
    "sweep file": sweep_file,
}


@pytest.mark.parametrize("case", YAML)
@pytest.mark.usefixtures("stubbed")
def test_anything_may_stand_in_a_yaml_file(case: str, lab: Path, tmp_path: Path) -> None:
    throw(lambda data: YAML[case](lab, tmp_path, data), 1)
    read_groups.cache_clear()
    read_keys.cache_clear()


CONFIGS = ("config", "generation_config", "tokenizer_config", "tokenizer")
FILES = (
    *(f"target/{name}.json" for name in CONFIGS),
    *("target/model.safetensors", "head/config.json", "head/model.safetensors", "prompts.jsonl", "bench.jsonl"),
)


@pytest.mark.parametrize("name", FILES)
def test_anything_may_stand_in_a_file_of_a_run(name: str, lab: Path, tmp_path: Path) -> None:
    kind, prompts = ("spec_bench", "bench.jsonl") if name == "bench.jsonl" else ("jsonl", "prompts.jsonl")
    arguments = [*of_models(lab), f"workload={kind}", f"workload.path={lab / prompts}", *CHEAP]
    programs = [(run, judge), (doctor.main, judge_findings)]

    def check(data: st.DataObject) -> None:
        with damaged(lab / name, data):
            main, judged = data.draw(st.sampled_from(programs))
            judged(ended(main, arguments, tmp_path))

    throw(check, 1)


RECORDS = ("study/strict/summary.json", "study/strict/requests.jsonl", "study/delta/rounds.jsonl", "study/sweep.json")


@pytest.mark.parametrize("name", RECORDS)
def test_anything_may_stand_in_a_record(name: str, lab: Path, tmp_path: Path) -> None:
    def check(data: st.DataObject) -> None:
        with damaged(lab / name, data):
            judge_report(ended(report, [str(lab / "study" / "strict"), str(lab / "study" / "delta")], tmp_path))

    throw(check, 1)


@pytest.mark.parametrize("name", ["summary.json", "requests.jsonl", "verify_rows.safetensors"])
def test_anything_may_stand_in_a_run_to_judge_again(name: str, lab: Path, tmp_path: Path) -> None:
    def check(data: st.DataObject) -> None:
        with damaged(lab / "kept" / name, data):
            judge(ended(rescore, [str(lab / "kept"), "acceptance=strict"], tmp_path))

    throw(check, 2)
