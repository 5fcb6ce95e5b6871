"""What a training leaves in its folder: nothing when refused, a reason when it broke down, and it goes on from both."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.core.errors import UserError
from spec_lab.train.block_config import BlockTrainingConfig, StoredAs
from spec_lab.train.config import TrainConfig
from spec_lab.train.drafter_config import Loss
from spec_lab.train.loop import TrainingDiverged
from spec_lab.train.output import LOG_FILE, output_folder
from spec_lab.train.sharing import stage_settings
from spec_lab.train.stages import RunFolder, run_stage
from spec_lab.train.target_config import ShippedTarget
from tests.tiny_checkpoints import refused

CPU = torch.device("cpu")


def dangling(root: Path) -> Path:
    root.symlink_to(root.parent / "unmounted")
    return root


def a_file(root: Path) -> Path:
    root.write_text("in the way")
    return root


def below_a_file(root: Path) -> Path:
    return a_file(root) / "below" / "it"


def read_only(root: Path) -> Path:
    return Path("/proc/spec_lab")  # even for root, for whom permissions are none


def not_a_path(root: Path) -> Path:
    return Path(f"{root}\0")


@pytest.mark.parametrize("make", [dangling, a_file, below_a_file, read_only, not_a_path])
def test_a_folder_that_cannot_be_written_is_refused(make: Any, tmp_path: Path) -> None:
    root = make(tmp_path / "out")
    before = sorted(tmp_path.iterdir())
    with refused(f"output_dir={root}", "choose another one"), output_folder(root):
        raise AssertionError("the training began")
    assert sorted(tmp_path.iterdir()) == before


def test_a_refused_training_leaves_neither_its_folder_nor_those_above_it(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "deeper" / "out"
    with pytest.raises(UserError), output_folder(root):
        logging.getLogger("spec_lab").warning("begun")
        with refused():
            run_stage(RunFolder(root), root / "stage", {"seed": 0}, CPU, refuse_late)
        assert (root / LOG_FILE).exists()
        raise UserError("cannot be trained")
    assert list(tmp_path.iterdir()) == []


def refuse_late(unfinished: Path) -> dict[str, Any]:
    (unfinished / "half").write_text("x")
    raise UserError("cannot be trained")


def test_a_refused_training_takes_nothing_away_from_a_folder_that_was_there(tmp_path: Path) -> None:
    root = tmp_path / "out"
    root.mkdir()
    with pytest.raises(UserError), output_folder(root):
        raise UserError("cannot be trained")
    assert root.is_dir()
    (root / "mine").write_text("x")
    with pytest.raises(UserError), output_folder(root):
        logging.getLogger("spec_lab").warning("begun")
        raise UserError("cannot be trained")
    assert (root / "mine").read_text() == "x"


def test_a_refused_training_leaves_what_an_earlier_stage_made(tmp_path: Path) -> None:
    root = tmp_path / "out"
    with pytest.raises(UserError), output_folder(root):
        run_stage(RunFolder(root), root / "first", {"seed": 0}, CPU, lambda unfinished: {})
        run_stage(RunFolder(root), root / "second", {"seed": 0}, CPU, refuse_late)
    assert {path.name for path in root.iterdir()} >= {"first", "records"}
    assert {path.name for path in (root / "records").iterdir()} == {"first.json", "first.lock"}


def test_what_is_logged_stands_in_the_folder(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out"):
        logging.getLogger("spec_lab.train").warning("step 2")
    logging.getLogger("spec_lab.train").warning("behind it")
    assert (tmp_path / "out" / LOG_FILE).read_text().endswith("[WARNING] - step 2\n")


def test_a_stage_that_broke_down_says_so_in_its_record_and_may_be_built_with_other_settings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    output, checkpoint = folder.drafter("eagle3"), folder.checkpoint(folder.drafter("eagle3"))

    def diverge(unfinished: Path) -> dict[str, Any]:
        checkpoint.parent.mkdir()
        checkpoint.write_text("weights of before")
        raise TrainingDiverged("the loss of step 7 is nan")

    with pytest.raises(TrainingDiverged):
        run_stage(folder, output, {"peak_learning_rate": 1.0}, CPU, diverge)
    record = json.loads(folder.record(output).read_text())
    assert record["failure"] == "the loss of step 7 is nan" and record["recipe"] == {"peak_learning_rate": 1.0}
    assert not output.exists() and not checkpoint.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"records", "checkpoints"}

    run_stage(folder, output, {"peak_learning_rate": 0.1}, CPU, lambda unfinished: {"curve": []})
    assert "failure" not in json.loads(folder.record(output).read_text()) and output.exists()
    with refused("a different peak_learning_rate"):
        run_stage(folder, output, {"peak_learning_rate": 1.0}, CPU, lambda unfinished: {})


def test_an_interrupted_stage_keeps_its_record_and_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def interrupted(unfinished: Path) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(folder, folder.generations, {"seed": 0}, CPU, interrupted)
    with refused("a different seed"):
        run_stage(folder, folder.generations, {"seed": 1}, CPU, lambda unfinished: {})
    run_stage(folder, folder.generations, {"seed": 0}, CPU, lambda unfinished: {})
    assert folder.generations.is_dir()


@pytest.mark.parametrize("knob", [{"loss": Loss.tv}, {"stored_as": StoredAs.fp8}], ids=str)
def test_a_knob_that_earlier_versions_lacked_tells_two_trainings_apart(knob: dict[str, Any], tmp_path: Path) -> None:
    """A folder of a training with it is not taken for one without it, nor the other way round."""
    own, usual = (
        stage_settings(TrainConfig(target=ShippedTarget(), drafter=BlockTrainingConfig(**each)))["pocket-dflash"]
        for each in (knob, {})
    )
    for number, (begun, other) in enumerate([(own, usual), (usual, own)]):
        folder = RunFolder(tmp_path / str(number))
        output = folder.drafter("dflash")
        run_stage(folder, output, begun, CPU, lambda unfinished: {})
        with refused(f"a different {next(iter(knob))}"):
            run_stage(folder, output, other, CPU, lambda unfinished: {})


def test_a_folder_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    training = TrainConfig(target=ShippedTarget(), drafter=BlockTrainingConfig())
    settings = stage_settings(training)["pocket-dflash"]
    folder = RunFolder(tmp_path)
    earlier = {key: value for key, value in settings.items() if key not in ("loss", "stored_as")}
    run_stage(folder, folder.drafter("dflash"), earlier, CPU, lambda unfinished: {})
    run_stage(folder, folder.drafter("dflash"), settings, CPU, lambda unfinished: {})
