"""Training's command line: typos are refused in a line, `--help` is complete, `target: shipped` is the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.assembly.drafters.trained import ZOO
from spec_lab.train.__main__ import main
from spec_lab.train.card import _reflow
from spec_lab.train.menu import train_menu
from spec_lab.train.mtp_recipe import MtpRecipe
from spec_lab.train.pipeline import Pipeline
from tests.test_train_pipeline import composed_pipeline

REFUSED = [
    ("drafter=eagel3", "did you mean eagle3?"),
    ("drafter=foo", "it takes one of eagle3, draft_model, frozen_kv, mtp_eagle, mtp_vanilla, none"),
    ("drafter=ngram", "drafter has no option ngram"),
    ("drafer=eagle3", "did you mean drafter?"),
    ("+drafer=eagle3", "did you mean drafter?"),
    ("+foo=3", "there is no key foo; see --help"),
    ("+seed=3", "write seed=3"),
    ("num_step=3", "did you mean drafter.optimisation.num_steps?"),
    ("drafter.name=mine", "write drafter=..."),
    ("seed=first", "seed takes a whole number, not 'first'"),
    ("drafter.kv_source_layers=3", "takes a list like [a,b]"),
    ("batch_size=3", "did you mean"),
    ("acceptance=strict", "there is no key acceptance"),
    ("--dry-run", "--cfg job"),
    ("--mulitrun", "did you mean --multirun?"),
    ("target.hidden_size=64", "leave it out or choose target=pocket"),
    ("drafter.draft_vocab_size=9", "choose drafter=eagle3"),
    ("corpus.row_length=256", "choose target=pocket"),
    ("drafter=none", "nothing to train; choose target=pocket"),
    ("drafter=eagle3,mtp_eagle", "add -m"),
    ("drafter.num_modules=2", "must be drafter.num_modules=2"),
    ("device=cpuu", "use auto, cpu, cuda or cuda:1"),
]


@pytest.mark.parametrize(("argument", "reason"), REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(
    argument: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    drafter = "mtp_vanilla" if argument.startswith(("drafter.d", "drafter.num_m")) else "frozen_kv"
    chosen = [] if argument.startswith(("drafter=", "--")) else [f"drafter={drafter}"]
    assert main([*chosen, argument]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("refused: ") and printed.err.count("\n") == 1
    assert reason in printed.err and "append" not in printed.err


def test_a_training_that_is_refused_in_a_multirun_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "device=one,two"]) == 2
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["device=one", "device=two"]


def test_an_error_of_ours_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Pipeline) -> None:
        raise ValueError("not the user's")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "run", fail)
    assert main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_lists_every_option_and_the_main_knobs_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = {line.strip("* ").split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for group in train_menu().groups.values():
        for option in group.options.values():
            assert option.description in lines[f"{group.name}={option.name}"]
    assert lines["target=shipped"].startswith("*") and lines["drafter=eagle3"].startswith("*")
    for key in train_menu().keys.values():
        assert key.explanation and key.explanation in lines[key.name]
    assert "--dry-run" not in lines and "--multirun" in lines["-m,"]


def test_the_shipped_target_is_the_default_and_pocket_trains_a_new_one() -> None:
    default = composed_pipeline("drafter=mtp_eagle")
    assert default.target is None and default.config.output_dir == "outputs/train-drafters"
    assert default.command() == "python -m spec_lab.train drafter=mtp_eagle"
    new = composed_pipeline("target=pocket")
    assert new.target is not None and new.config.output_dir == "outputs/train"
    assert new.command() == "python -m spec_lab.train target=pocket drafter=eagle3"


@pytest.mark.parametrize("option", ["drafter", "target"])
def test_every_option_opens_with_a_command_that_takes_it(option: str) -> None:
    for part in train_menu().groups[option].options.values():
        *_, module, rest = part.command.split(maxsplit=3)
        assert module == "spec_lab.train" and f"{option}={part.name}" in rest.split()
        composed_pipeline(*rest.split())


@pytest.mark.parametrize("folder", sorted(path.name for path in ZOO.glob("pocket*")))
def test_the_command_on_a_shipped_card_trains_what_the_card_is_of(folder: str) -> None:
    lines = (ZOO / folder / "README.md").read_text(encoding="utf-8").splitlines()
    [command] = [line.strip() for line in lines if line.startswith("    python -m spec_lab.train")]
    pipeline = composed_pipeline(*command.split()[3:])
    assert pipeline.command() == command
    if folder == "pocket":
        assert pipeline.target is not None
    else:
        assert pipeline.drafter is not None and folder == f"pocket-{pipeline.drafter.config.name}"
    assert (pipeline.target is not None) == (folder in ("pocket", "pocket-eagle3"))


@pytest.mark.parametrize(
    ("name", "position"), [("mtp_eagle", "position p:"), ("mtp_vanilla", "position p-i in module i")]
)
def test_a_card_of_mtp_modules_names_the_position_each_stands_at(name: str, position: str) -> None:
    recipe = composed_pipeline(f"drafter={name}").drafter
    assert isinstance(recipe, MtpRecipe)
    reading = _reflow(recipe.describe(ZOO / f"pocket-{name}").reading).strip().split("\n\n")[1]
    assert position in " ".join(reading.split())
    assert reading in (ZOO / f"pocket-{name}" / "README.md").read_text(encoding="utf-8")
