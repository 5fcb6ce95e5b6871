"""Files of a training that were cut short, or hold something else, are refused in one line that names them."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from spec_lab.core.errors import UserError
from spec_lab.train.checkpoint import load_weights
from spec_lab.train.data import TrainingTokens
from spec_lab.train.generations import Generations
from spec_lab.train.loop import train
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.output import LOG_FILE, output_folder
from spec_lab.train.stages import RunFolder, run_stage
from spec_lab.train.texts.header import TextsHeader, WrittenBy
from tests.test_train_loop import Batches, Interrupted, Regression

CPU = torch.device("cpu")
OPTIMISATION = OptimisationConfig(
    num_steps=4, batch_size=1, peak_learning_rate=0.1, num_warmup_steps=1, checkpoint_every=3
)


def checkpoint_bytes(folder: Path) -> bytes:
    file = folder / "state.pt"
    with pytest.raises(Interrupted):
        train(Regression(), Batches(interrupt_at=3), OPTIMISATION, file, CPU)
    return file.read_bytes()


def read_checkpoint(file: Path) -> None:
    train(Regression(), Batches(), OPTIMISATION, file, CPU)


def generations_bytes(folder: Path) -> bytes:
    texts = Generations(torch.zeros(2, 5, dtype=torch.int16), torch.tensor([1, 2]), torch.tensor([3, 4]))
    texts.save(folder / "texts")
    return (folder / "texts").read_bytes()


def read_generations(file: Path) -> None:
    Generations.load(file)


def rows_bytes(folder: Path) -> bytes:
    written = io.BytesIO()
    np.save(written, np.zeros((2, 20), dtype=np.uint16))
    return written.getvalue()


def read_rows(file: Path) -> None:
    file.rename(file.with_name("rows.npy"))
    np.save(file.with_name("natural.npy"), np.zeros(50, dtype=np.uint16))
    TrainingTokens.load(file.parent, 0.5, 0, CPU)


def record_bytes(folder: Path) -> bytes:
    return json.dumps({"recipe": {"seed": 0}, "device": "cpu"}).encode()


def read_record(file: Path) -> None:
    folder = RunFolder(file.parent)
    folder.records.mkdir()
    file.rename(folder.record(folder.generations))
    run_stage(folder, folder.generations, {"seed": 0}, CPU, lambda unfinished: {})


def header_bytes(folder: Path) -> bytes:
    by = WrittenBy("pocket", "w", "t", "c", 8)
    TextsHeader(by, {"num_texts": 4}, {"a.jsonl": "d"}, {"prompts-0.jsonl": {"kept": 1}}).write(folder)
    return (folder / "header.json").read_bytes()


def read_header(file: Path) -> None:
    file.rename(file.with_name("header.json"))
    TextsHeader.read(file.parent)


KINDS = {
    "checkpoint": (checkpoint_bytes, read_checkpoint),
    "generations": (generations_bytes, read_generations),
    "rows": (rows_bytes, read_rows),
    "record": (record_bytes, read_record),
    "header": (header_bytes, read_header),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_is_cut_or_overwritten_is_read_or_refused(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make, read = KINDS[kind]
    folder = tmp_path_factory.mktemp("malformed")
    whole = make(folder)
    start = data.draw(st.integers(0, len(whole)))
    file = folder / "malformed"
    file.write_bytes(
        whole[:start] + data.draw(st.binary(max_size=8)) + data.draw(st.sampled_from([b"", whole[start:]]))
    )
    refusal = None
    try:
        read(file)
    except UserError as error:
        refusal = str(error)
    assert refusal is None or (str(folder) in refusal and "\n" not in refusal)


@pytest.mark.parametrize("broken", [b" ", b"(", b"'"])
def test_a_header_of_rows_that_is_no_python_is_refused(broken: bytes, tmp_path: Path) -> None:
    file = tmp_path / "malformed"
    file.write_bytes(rows_bytes(tmp_path).replace(b"}", broken, 1))
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"recipe": 3}', "null", "[" * 100_000, '"\\ud800"', "9" * 5000])
def test_a_record_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "record").write_text(text)
    with pytest.raises(UserError, match=r"generations.json cannot be read"):
        read_record(tmp_path / "record")


@pytest.mark.parametrize(
    "changed", [{"files": []}, {"files": {"prompts-0": 3}}, {"settings": 5}, {"written_by": None}, {"format": 99}]
)
def test_a_header_of_texts_with_values_of_other_kinds_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    content = json.loads(header_bytes(tmp_path)) | changed
    (tmp_path / "file").write_text(json.dumps(content))
    with pytest.raises(UserError, match="has format 99, but" if "format" in changed else "cannot be read"):
        read_header(tmp_path / "file")


def test_a_pipe_in_the_place_of_a_lock_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.records.mkdir()
    lock = folder.record(folder.generations).with_suffix(".lock")
    os.mkfifo(lock)
    with pytest.raises(OSError, match=re.escape(str(lock))):
        run_stage(folder, folder.generations, {"seed": 0}, CPU, lambda unfinished: {})


def test_an_output_that_no_record_tells_of_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.generations.mkdir()
    with pytest.raises(UserError, match=r"generations exists, but has no .*json that describes it"):
        run_stage(folder, folder.generations, {"seed": 0}, CPU, lambda unfinished: {})


def test_a_pipe_in_the_place_of_a_log_or_a_checkpoint_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOG_FILE)
    with pytest.raises(UserError, match=f"{LOG_FILE} is not a file"), output_folder(tmp_path):
        raise AssertionError("nothing is to be begun")
    os.mkfifo(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="checkpoint cannot be read"):
        read_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("cut", [0, 3, -1])
def test_a_finished_stage_whose_weights_were_cut_is_not_skipped(cut: int, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def build(unfinished: Path) -> dict[str, Any]:
        save_file({"weight": torch.ones(4)}, unfinished / "model.safetensors")
        (unfinished / "config.json").write_text("{}")
        return {}

    stage = folder, folder.drafter("eagle3"), {"seed": 0}, CPU, build
    run_stage(*stage)
    run_stage(*stage)
    file = folder.drafter("eagle3") / "model.safetensors"
    (file.parent / "config.json").rename(file.parent / "config")
    with pytest.raises(UserError, match=r"has no config\.json; delete it and what was made with it"):
        run_stage(*stage)
    (file.parent / "config").rename(file.parent / "config.json")
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read .*; delete it and what was made with it"):
        run_stage(*stage)


def test_an_output_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path.name} cannot be read .*; delete it"):
        load_weights(tmp_path)


@pytest.mark.parametrize("content", ['{"weights": "", "layers": {}}', "[]"])
def test_a_header_of_something_else_is_not_to_be_deleted(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(UserError, match=r"is not a header of texts; name a folder") as caught:
        read_header(tmp_path / "file")
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_is_refused_and_a_whole_one_is_read(kind: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    whole, folder = make(tmp_path), tmp_path / "second"
    folder.mkdir()
    (folder / "file").write_bytes(whole)
    read(folder / "file")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "file")


def test_a_checkpoint_that_is_refused_is_not_thrown_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoint = folder.checkpoint(folder.drafter("eagle3"))
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"not a checkpoint")

    def resume(unfinished: Path) -> dict[str, object]:
        read_checkpoint(checkpoint)
        return {}

    with pytest.raises(UserError, match=r"pocket-eagle3.pt cannot be read"):
        run_stage(folder, folder.drafter("eagle3"), {"seed": 0}, CPU, resume)
    assert checkpoint.exists() and not folder.record(folder.drafter("eagle3")).exists()
