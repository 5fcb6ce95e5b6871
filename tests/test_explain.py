"""A file of options that does not compose is refused in a line with the file, the key, the cause and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.program.options import conf_folder

GLOBAL = b"# @package _global_\n"
BOMB = b"a0: &a0 [1, 1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d, *a%d]\n" % (n, n, *[n - 1] * 3) for n in range(1, 40))
BROKEN = {
    "unknown key": (GLOBAL + b"max_new_token: 5", ["max_new_token;", "did you mean max_new_tokens?"]),
    "key of another option": (GLOBAL + b"drafter: {max_ngram: 3}", ["drafter.max_ngram", "choose drafter=ngram"]),
    "value": (GLOBAL + b"max_new_tokens: hello", ["max_new_tokens takes a whole number", "'hello'"]),
    "value of a closed set": (GLOBAL + b"references: [plane]", ["references[0]", "'plane'", "plain, unpruned"]),
    "group that is a number": (GLOBAL + b"sampling: 3", ["SamplingConfig", "KEY: VALUE"]),
    "text": (b"just text", ["keys of experiment, which cannot have keys", "KEY: VALUE"]),
    "list": (b"- a\n- b", ["keys of experiment, which cannot have keys", "KEY: VALUE"]),
    "list of all": (GLOBAL + b"- a\n- b", ["do not fit", "KEY: VALUE"]),
    "number": (GLOBAL + b"3", ["type: int", "KEY: VALUE"]),
    "bytes": (b"\xff\xfe", ["can't decode byte", "correct it: UTF-8 text"]),
    "loop": (b"a: &a [*a]", ["refers to itself", "correct it"]),
    "aliases": (GLOBAL + BOMB, ["more than 100000 values, counting what its aliases stand for", "use fewer"]),
    "defaults of itself": (GLOBAL + b"defaults: [mine]", ["includes itself"]),
    "sweep without end": (
        GLOBAL + b"hydra: {sweeper: {params: {seed: 'range(0,1000000000)'}}}",
        ["seed=range(0,1000000000) has more than 10000 jobs"],
    ),
    "group that no run has": (GLOBAL + b"size: full", ["size is chosen on the command line"]),
    "option": (GLOBAL + b"defaults: [override /drafter: ngran]", ["drafter has no option ngran", "mean ngram?"]),
    "option like none": (
        GLOBAL + b"defaults: [override /drafter: xyz]",
        ["no option xyz", "it takes one of "],
    ),
    "group": (GLOBAL + b"defaults: [override /drafte: ngram]", ["no key drafte;", "did you mean drafter?"]),
    "null for a group": (GLOBAL + b"drafter: null", ["'drafter' is not Opt", "- override /drafter: ngram"]),
    "a text for a group": (GLOBAL + b"drafter: ngram", ["str is not a subclass", "- override /drafter: ngram"]),
    "byte order mark": (b"\xef\xbb\xbf" + GLOBAL + b"seed: 4", ["byte order mark", "save it without"]),
    "a sweep of one run": (
        GLOBAL + b"hydra: {sweeper: {params: {seed: '1,2'}}}",
        ["hydra.sweeper.params", "add -m, or mode: MULTIRUN"],
    ),
    "package of another name": (b"# mine\n# @package global\nseed: 3", ["write '# @package _global_'"]),
    "values of a sweep as a list": (
        GLOBAL + b"hydra: {mode: MULTIRUN, sweeper: {params: {batch_size: [1, 2]}}}",
        ["batch_size takes a whole number", "are written 1,2"],
    ),
    "joined keys": (
        GLOBAL + b"drafter.path: x",
        ["drafter.path is read as one name", "write `drafter: {path: VALUE}`"],
    ),
    "joined keys of a part": (GLOBAL + b"cache: {a.b: 3}", ["a.b is read as one name"]),
    "interpolation": (GLOBAL + b"seed: ${seed}", ["seed: ", "replace it by a value"]),
    "keys below no group": (
        b"name: mine\nbatch_size: 2",
        ["keys of experiment, which cannot have keys", "# @package _global_"],
    ),
    "override below no group": (
        b"defaults: [override /drafter: ngram]",
        ["no drafter is chosen", "# @package _global_", "`- override /drafter: OPTION`"],
    ),
    "override of another place": (
        GLOBAL + b"defaults: [override /drafter@x: ngram]",
        ["`- override /drafter: OPTION`"],
    ),
    "override without a slash": (GLOBAL + b"defaults: [override drafter: ngram]", ["`- override /drafter: OPTION`"]),
    "group without a slash": (GLOBAL + b"defaults: [drafter: ngram]", ["`- override /drafter: OPTION`"]),
    "group once more": (GLOBAL + b"defaults: [/drafter: ngram]", ["`- override /drafter: OPTION`"]),
    "+ before a key of the sweep": (
        GLOBAL + b"hydra: {mode: MULTIRUN, sweeper: {params: {+seed: '1,2'}}}",
        ["seed exists already, so +seed adds nothing; write seed without +"],
    ),
    "values of a sweep that cannot be read": (
        GLOBAL + b"hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,,2'}}}",
        ["seed: 1,,2 cannot be read", "separate values by single commas, as in seed: 1,2"],
    ),
    "misspelt defaults": (GLOBAL + b"default: [override /drafter: ngram]", ["no key default; did you mean defaults?"]),
    "an option behind the file's own keys": (
        GLOBAL + b"defaults: [_self_, /experiment/drafters]\nseed: 3",
        ["put _self_ last"],
    ),
    "no value": (GLOBAL + b"workload:\n  limit: ???", ["`limit: ???` does not change limit"]),
    "group without override": (GLOBAL + b"defaults: [/drafte: ngram]", ["no drafte/ngram", "did you mean drafter?"]),
}


FOUND_WHEN_COMPOSED = (
    "a sweep of one run",
    "+ before a key of the sweep",
    "values of a sweep as a list",
    "interpolation",
    "group once more",
)
"""No file is known any more."""


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_of_options_is_named_with_a_remedy(
    case: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = BROKEN[case]
    file = empty_folder / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    assert main(["--config-dir", str(empty_folder / "conf"), "experiment=mine", "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ") and not line.endswith(":")
    named = "" if case in FOUND_WHEN_COMPOSED else "experiment/mine.yaml: "
    assert all(word in line for word in [named, *words]), line


def test_an_option_whose_file_sets_no_name_is_refused_with_the_line_to_write(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "workload").mkdir()
    (empty_folder / "workload" / "mine.yaml").write_text("limit: 3")
    assert main(["--config-dir", str(empty_folder), "workload=mine", "--dry-run"]) == 2
    assert "workload.name has no value; write `name: OPTION` in the file" in capsys.readouterr().err


@pytest.mark.parametrize(("group", "name"), [("drafter", "eagle3"), ("acceptance", "fly"), ("tree", "dynamic")])
def test_a_file_with_the_name_of_an_option_without_its_keys_is_refused_with_the_line_to_write(
    group: str, name: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = empty_folder / group / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"name: {name}")
    typed = ["--config-dir", str(empty_folder), f"{group}=mine", "--dry-run"]
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert f"refused: {group}: an option of your own has `name: {name}` without " in error
    file.write_text(f"defaults: [{name}, _self_]")
    assert f"`{file.read_text()}`" in error
    assert main(typed) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drafter: {num_draft_tokens: 5}", "write its keys without the group above them"),
        ("drafter.num_draft_tokens: 5", "write `num_draft_tokens: VALUE`"),
        ("batch_size: 5", "batch_size is none; write it in a file of experiment"),
    ],
)
def test_keys_of_another_place_are_refused_with_their_own(
    text: str, said: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "drafter").mkdir()
    (empty_folder / "drafter" / "mine.yaml").write_text(f"defaults: [eagle3, _self_]\n{text}")
    assert main(["--config-dir", str(empty_folder), "drafter=mine", "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_an_option_of_two_options_is_told_to_leave_one_out(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "drafter").mkdir()
    (empty_folder / "drafter" / "mine.yaml").write_text("defaults: [ngram, eagle3, _self_]")
    assert main(["--config-dir", str(empty_folder), "drafter=mine", "--dry-run"]) == 2
    assert "a file of drafter names eagle3 and another option of drafter; leave one out" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["mine.yaml", "experiment/mine.yml", "conf/experiment/mine.yaml", "exp/mine.yaml"])
@pytest.mark.parametrize("typed", [True, False])
def test_a_file_of_options_that_lies_elsewhere_is_named(
    place: str, typed: bool, empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = empty_folder / "conf" / place
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nseed: 3")
    monkeypatch.chdir(empty_folder)
    assert main([*(["--config-dir", "conf"] if typed else []), "experiment=mine", "--dry-run"]) == 2
    assert f"conf/{place} is not read; --config-dir DIR reads DIR/experiment/mine.yaml" in capsys.readouterr().err


def test_a_file_of_another_group_or_of_the_lab_is_not_said_to_lie_elsewhere(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "conf" / "acceptance").mkdir(parents=True)
    (empty_folder / "conf" / "acceptance" / "mine.yaml").write_text("defaults: [fly]")
    monkeypatch.chdir(empty_folder)
    for words in (["drafter=mine"], ["--config-dir", "conf", "drafter=mine"]):
        assert main([*words, "--dry-run"]) == 2
        assert "drafter has no option mine" in capsys.readouterr().err
    monkeypatch.chdir(conf_folder().parent)
    assert main(["prune=eagle3", "--dry-run"]) == 2
    assert "prune has no option eagle3" in capsys.readouterr().err


def test_an_option_that_was_typed_is_refused_as_it_was_typed(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config-dir", str(empty_folder), "drafter=ngran", "--dry-run"]) == 2
    assert "refused: drafter=ngran: drafter has no option ngran; did you mean ngram?" in capsys.readouterr().err


def test_an_interval_that_no_sweeper_here_samples_is_refused_with_what_to_type(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "seed=interval(0,3)", "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: interval(...) has no number of values; sweep a few, such as KEY=0.1,0.5")


@pytest.mark.parametrize("key", ["dir: ../x", "subdir: ../../x"])
def test_no_file_moves_the_folder_of_a_sweep(key: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = empty_folder / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"# @package _global_\nhydra: {{mode: MULTIRUN, sweep: {{{key}}}, sweeper: {{params: {{seed: '1,2'}}}}}}"
    )
    assert main(["--config-dir", str(empty_folder / "conf"), "experiment=mine"]) == 2
    assert "but the lab itself names its folders; use output_dir=DIR" in capsys.readouterr().err.splitlines()[-1]
    assert not list(empty_folder.rglob("summary.json"))


def test_a_file_that_the_lab_has_itself_is_refused_as_it_would_not_be_read(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "drafter").mkdir()
    (empty_folder / "drafter" / "ngram.yaml").write_text("name: eagle3")
    folder = ["--config-dir", str(empty_folder)]
    assert main([*folder, "--dry-run"]) == 2
    assert "ngram.yaml: the lab has a file drafter/ngram.yaml, which is read instead" in capsys.readouterr().err
    assert main([*folder, *folder, "--dry-run"]) == 2
    assert "--config-dir is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["acceptance=fly", "acceptance=rejection"])
def test_an_option_typed_over_that_of_a_point_is_the_one_to_leave_out(
    typed: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment=lossy", typed, "--dry-run"]) == 2
    assert "leave acceptance=... out" in capsys.readouterr().err
