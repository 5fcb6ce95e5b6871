"""Training's command line: typos are refused in a line, `--help` is complete, `target: shipped` is the default."""

from __future__ import annotations

import dataclasses
import operator
from pathlib import Path

import pytest

from spec_lab.options.shipped import ZOO
from spec_lab.train.__main__ import main
from spec_lab.train.loop import TrainingDiverged
from spec_lab.train.menu import train_menu
from spec_lab.train.pipeline import Pipeline
from spec_lab.train.sharing import recorded
from tests.test_train_pipeline import composed_config, composed_pipeline

HF = f"target=hf target.path={ZOO / 'pocket'}"
REFUSED = [
    ("drafter=eagel3", "did you mean eagle3?"),
    ("drafter=ngram", "drafter has no option ngram"),
    ("drafer=eagle3", "did you mean drafter?"),
    ("+foo=3", "there is no key foo; see --help"),
    ("+seed=3", "write seed=3"),
    ("num_step=3", "did you mean drafter.optimisation.num_steps?"),
    ("drafter.name=mine", "write drafter=..."),
    ("seed=first", "seed takes a whole number, not 'first'"),
    ("drafter.kv_source_layers=3", "takes a list like [1,2]"),
    ("drafter.loss=mse", "it takes kl, ce, "),
    ("logger.mode=null", "logger.mode has no value null, it takes auto, "),
    ("batch_size=3", "did you mean"),
    ("--dry-run", "--cfg job"),
    ("--mulitrun", "did you mean --multirun?"),
    ("target.hidden_size=64", "leave it out or choose target=pocket"),
    ("drafter.draft_vocab_size=9", "choose drafter=eagle3"),
    ("corpus.row_length=256", "leave it out, or choose target=pocket|pocket_hybrid"),
    ("evaluation.every=9", "or choose target=hf"),
    ("packing.row_length=64", "or choose target=hf"),
    ("writing.num_texts=9", "target=hf and no texts="),
    (f"{HF} texts=nowhere writing.num_texts=9", "target=hf and no texts="),
    *((f"{HF} {word}", "or choose target=shipped") for word in ("generations.max_new_tokens=8", "num_workers=2")),
    (f"{HF} tokenizer.vocab_size=999", "or choose target=pocket"),
    (f"{HF} evaluation.limit_per_category=5", "choose evaluation.prompts="),
    (f"{HF} --plan --show-data=3", "each does something different"),
    (f"{HF} --plan=3", "write --plan"),
    ("drafter=eagle3,mtp_eagle", "add -m"),
    ("drafter.num_modules=2", "must be drafter.num_modules=2"),
    ("drafter.num_modules=1", "or drafter=mtp_eagle for one module in all steps"),
    ("drafter=mtp_vanilla drafter.num_modules=1 drafter.num_unrolled_steps=1", "use evaluation.num_draft_tokens=1"),
    ("drafter=mtp_eagle drafter.num_modules=3 drafter.num_unrolled_steps=3", "use drafter.num_modules=1"),
    ("device=cpuu", "use device=auto, cpu, cuda or cuda:1"),
    ("drafter.optimisation.log_every=0", "log_every=0: must be at least 1"),
    ("drafter.optimisation.peak_learning_rate=nan", "above 0 and at most 1"),
    ("generations.batch_size=null", "takes a whole number, not null"),
    ("drafter.optimisation=3", "is not a key, but a set of keys"),
    ("output_dir=/dev/null/out", "output_dir=/dev/null/out cannot be written"),
    ("+_target_=os.system", "_target_"),
    ("+drafter._target_=os.system", "_target_"),
]


@pytest.mark.parametrize(("argument", "reason"), REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(
    argument: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    drafter = "mtp_vanilla" if argument.startswith(("drafter.d", "drafter.num_m")) else "frozen_kv"
    chosen = [] if argument.startswith(("drafter=", "--")) else [f"drafter={drafter}"]
    assert main([*chosen, *argument.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("refused: ") and printed.err.count("\n") == 1
    assert reason in printed.err and "append" not in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_is_refused_in_a_multirun_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "device=one,two"]) == 2
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["device=one", "device=two"]
    assert list(tmp_path.iterdir()) == []


def test_trainings_of_a_sweep_that_cannot_share_a_folder_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "run", lambda self: pytest.fail("one was trained"))
    assert main(["-m", "seed=0,1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == (
        "refused: output_dir=outputs/train-drafters would hold generations of seed=0 and of seed=1; give each training "
        "its own folder: 'output_dir=outputs/train-drafters/${seed}'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_remedy_for_trainings_that_cannot_share_a_folder_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[str] = []
    monkeypatch.setattr(Pipeline, "run", lambda self: trained.append(self.config.output_dir))
    assert main(["-m", "seed=0,1", "output_dir=o/${seed}"]) == 0
    assert trained == ["o/0", "o/1"]


def test_a_multirun_of_no_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "drafter=glob(nope*)"]) == 2
    assert "selects no job" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_default_output_dir_may_be_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").symlink_to("unmounted")
    assert main([]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: output_dir=outputs/train-drafters cannot be written")


@pytest.mark.parametrize(
    ("arguments", "cleans_up"),
    [(["debug=smoke"], False), (["-m", "debug=smoke", "drafter=eagle3,mtp_eagle"], True)],
    ids=["alone", "behind a library's error"],
)
def test_ctrl_c_ends_a_training_and_the_multirun_it_is_one_of(
    arguments: list[str],
    cleans_up: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = []

    def interrupt(self: Pipeline) -> None:
        begun.append(self.config.seed)
        try:
            raise KeyboardInterrupt
        finally:
            if cleans_up:
                raise RuntimeError("nothing to stop")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "run", interrupt)
    assert main(arguments) == 130
    assert begun == [0]
    assert capsys.readouterr().err == "interrupted; the same command continues from here\n"


def test_a_training_that_diverges_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(self: Pipeline) -> None:
        raise TrainingDiverged("the loss of step 7 is nan; lower optimisation.peak_learning_rate")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "run", diverge)
    assert main([]) == 1
    assert capsys.readouterr().err == "failed: the loss of step 7 is nan; lower optimisation.peak_learning_rate\n"


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
        assert key.explanation and key.explanation in lines[key.name] and key.bounds.in_words() in lines[key.name]
    assert "(above 0 and at most 1)" in lines["target.optimisation.peak_learning_rate"]
    assert "--dry-run" not in lines and "--multirun" in lines["-m,"]


OPTIMISATION = {
    "num_steps": 8000,
    "batch_size": 96,
    "peak_learning_rate": 2e-3,
    "num_warmup_steps": 200,
    "weight_decay": 0.05,
    "max_grad_norm": 1.0,
    "checkpoint_every": 1000,
    "log_every": 500,
}
UNROLLED = {"num_unrolled_steps": 5, "step_loss_decay": 0.8, "optimisation": OPTIMISATION}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
RECORDED = {
    "eagle3": UNROLLED | HEADS | {"intermediate_size": 512, "draft_vocab_size": 2048},
    "mtp_eagle": UNROLLED | HEADS | {"num_modules": 1, "intermediate_size": 1152},
    "mtp_vanilla": UNROLLED | HEADS | {"num_modules": 3, "intermediate_size": 832, "num_unrolled_steps": 3},
    "frozen_kv": UNROLLED
    | {"hidden_size": 224, "intermediate_size": 256, "num_heads": 4, "kv_source_layers": [3, 5, 7]}
    | {"optimisation": OPTIMISATION | {"num_steps": 7000}},
    "draft_model": {"hidden_size": 192, "intermediate_size": 512, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1}
    | {"head_dim": 64, "prompt_loss_weight": 0.1, "optimisation": OPTIMISATION | {"num_steps": 12000}},
}
"""What the records of trainings made so far hold of each drafter, beside its name."""


@pytest.mark.parametrize("drafter", sorted(RECORDED))
def test_an_output_dir_of_the_same_settings_goes_on_whatever_version_began_it(drafter: str) -> None:
    config = composed_config(f"drafter={drafter}")
    assert recorded(config.drafter) == RECORDED[drafter] | {"name": drafter}


def test_the_record_of_a_target_is_that_of_the_trainings_so_far() -> None:
    optimisation = OPTIMISATION | {
        "num_steps": 20000,
        "batch_size": 64,
        "num_warmup_steps": 500,
        "weight_decay": 0.1,
        "checkpoint_every": 5000,
        "log_every": 1000,
    }
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 8, "natural_fraction": 0.08}
    config = composed_config("target=pocket")
    assert recorded(config.target) == HEADS | sizes | {"optimisation": optimisation}
    assert dataclasses.asdict(config.tokenizer) == {"vocab_size": 4096, "num_examples_per_category": 1500}
    assert dataclasses.asdict(config.corpus) == {
        "num_examples_per_category": 90000,
        "num_shards": 64,
        "row_length": 512,
        "num_natural_documents": None,
    }
    assert dataclasses.asdict(config.generations) == {
        "num_checkable_prompts": 3500,
        "num_natural_prompts": 10000,
        "num_shards": 16,
        "max_new_tokens": 256,
        "row_length": 321,
        "batch_size": 4096,
        "sampled_fraction": 0.2,
        "temperature": 1.0,
    }


@pytest.mark.parametrize("option", ["eagle3", "draft_model", "frozen_kv", "mtp_eagle", "mtp_vanilla"])
def test_help_gives_the_values_that_are_composed(option: str) -> None:
    composed = composed_config("target=pocket", f"drafter={option}")
    for key in train_menu().keys.values():
        chosen = {"drafter": option, "target": "pocket"}.get(key.name.partition(".")[0], "")
        if chosen in key.defaults:
            assert operator.attrgetter(key.name)(composed) == key.defaults[chosen], key.name


def test_the_shipped_target_is_the_default_and_pocket_trains_a_new_one() -> None:
    default = composed_pipeline("drafter=mtp_eagle")
    assert default.target is None and default.config.output_dir == "outputs/train-drafters"
    assert default.command() == "python -m spec_lab.train drafter=mtp_eagle"
    new = composed_pipeline("target=pocket")
    assert new.target is not None and new.config.output_dir == "outputs/train"
    assert new.command() == "python -m spec_lab.train target=pocket drafter=eagle3"


@pytest.mark.parametrize("option", ["target", "drafter"])
def test_every_option_opens_with_a_command_that_takes_it(option: str) -> None:
    for part in train_menu().groups[option].options.values():
        *_, module, rest = part.command.split(maxsplit=3)
        assert module == "spec_lab.train" and f"{option}={part.name}" in rest.split()
        if "DIR" not in rest:  # a folder of one's own
            composed_pipeline(*rest.split())


@pytest.mark.parametrize("folder", sorted(path.name for path in ZOO.glob("pocket*")))
def test_the_command_on_a_shipped_card_trains_what_the_card_is_of(folder: str) -> None:
    lines = (ZOO / folder / "README.md").read_text(encoding="utf-8").splitlines()
    [command] = [line.strip() for line in lines if line.startswith("    python -m spec_lab.train")]
    pipeline = composed_pipeline(*command.split()[3:])
    assert pipeline.command() == command
    target, _, drafter = folder.partition("-")
    trained = pipeline.config.trained_target
    if drafter:
        assert pipeline.drafter is not None and pipeline.drafter.config.drafts_as == drafter
    assert target == ("pocket" if trained is None else trained.option)
    assert (trained is not None) == (folder in ("pocket", "pocket-eagle3") or target != "pocket")
