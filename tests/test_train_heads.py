"""A head for any target: what trains and what serves it compute the same, for tiny targets of several families."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spec_lab.checkpoints.checkpoint import stored_tensors
from spec_lab.checkpoints.taps import Tap
from spec_lab.collect import CollectConfig, collect
from spec_lab.core.errors import UserError
from spec_lab.export.folders import load_drafter, save_drafter
from spec_lab.train import serving
from spec_lab.train.config import Optimisation, TargetChoice
from spec_lab.train.group import ALONE
from spec_lab.train.heads import HEADS as KINDS
from spec_lab.train.heads import Eagle3
from spec_lab.train.job import train_head
from spec_lab.train.proof import NotServed, Proof, Prover
from spec_lab.train.target import FrozenTarget
from spec_lab.train.truth import Truth
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_gemma4 import make_tiny_gemma4
from tests.tiny_gpt_oss import make_tiny_gpt_oss
from tests.train_lab import CPU, HEADS, losses, record_run, small, texts_of

EAGLE3 = HEADS["eagle3"]
LAYOUTS = {
    "eagle3": ["speculators"],
    "dspark": ["speculators", "deepspec"],
    "dflash": ["speculators"],
    "dflash2": ["speculators"],
}


def make_target(folder: Path, family: str) -> None:
    if family == "gemma4":
        make_tiny_gemma4(folder, "e2b")
    elif family == "gpt_oss":
        make_tiny_gpt_oss(folder, num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4)
    else:
        make_tiny_target(folder, family)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and a run of it, made once."""
    folder = tmp_path_factory.mktemp("made")
    make_tiny_target(folder / "target", "llama")
    record_run(folder / "texts", folder / "target")
    return folder


@pytest.fixture
def llama(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def train(folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a tiny head, and return its record."""
    config = small(folder / "target", EAGLE3, folder / "texts", **changes)
    train_head(config, folder / "out")
    record: dict[str, Any] = json.loads((folder / "out" / "training.json").read_text())
    return record


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A training that was not disturbed, and the folders that it proved."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("whole"), dirs_exist_ok=True))
    prove = Prover.prove

    def listed(self: Prover, head: Path) -> Proof:
        with (folder / "proved").open("a") as lines:
            lines.write(f"{head.name}\n")
        return prove(self, head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prover, "prove", listed)
        return folder, train(folder)


def test_a_head_is_proved_trained_watched_and_proved_again(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, record = whole
    assert (folder / "proved").read_text().split() == ["untrained", "best-2", "best-4", "best-6", "best"]
    assert [point["step"] for point in record["points"]] == [2, 4, 6] and set(record["lines"]) == {"ngram", "untrained"}
    for point in record["points"]:
        assert len(point["decoded"]["conditional_rates"]) == 3 and point["decoded"]["interval"]
        assert set(point["decoded"]["by_category"]) <= {"a", "b", "c"}
    assert max(record["proof"]["after"]["differences"]) < 1e-4 and record["proof"]["after"]["largest_logit"] > 0.1
    assert record["steps"] == 6 and [step for step, _ in record["losses"]] == [2, 4, 6]
    best = max(point["decoded"]["acceptance_length"] for point in record["points"])
    [kept] = [point for point in record["points"] if point["step"] == record["best_step"]]
    assert kept["decoded"]["acceptance_length"] == best
    card = (folder / "out" / "README.md").read_text()
    assert "| ngram |" in card and f"| step {record['best_step']} | {best:.3f} |" in card
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight"}
    assert names < set(load_drafter(folder / "out")[0])
    left = {path.name for path in (folder / "out").iterdir()}
    assert left == {"README.md", "training.json", "config.json", "model.safetensors"}
    with pytest.raises(UserError, match="has a finished head"):
        train_head(small(folder / "target", EAGLE3, folder / "texts"), folder / "out")


def test_a_head_that_reads_another_layer_than_it_is_served_is_not_trained(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eagle3, "taps", lambda *_: (Tap(0), Tap(3), Tap(4)))
    with pytest.raises(NotServed, match="training forward and the engine differ"):
        train(llama)
    assert not (llama / "out" / "training.json").exists()


def test_a_large_drafter_lies_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_lab.export.folders.MOST_FILE_BYTES", 200)
    tensors = {f"weight_{index}": torch.full((8, 8), float(index)) for index in range(3)}
    save_drafter(tensors, {"hidden_size": 8}, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 and (tmp_path / "model.safetensors.index.json").exists()
    loaded, _ = load_drafter(tmp_path)
    assert {name: float(tensor[0, 0]) for name, tensor in loaded.items()} == {f"weight_{i}": i for i in range(3)}
    assert set(stored_tensors(tmp_path)) == set(tensors)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("gemma4", "mtp_eagle"),
        ("gemma4", "eagle3"),
        ("gemma4", "draft_model"),
        ("qwen2", "mtp_eagle"),
        ("qwen2", "frozen_kv"),
        ("gemma4", "frozen_kv"),
        ("llama", "dspark"),
        ("llama", "dflash"),
        ("qwen3", "eagle3"),
        ("qwen3", "dflash2"),
        ("gemma4", "p_eagle"),
        ("gpt_oss", "eagle3"),
    ],
)
def test_heads_for_tiny_targets_of_all_families_are_proved_before_and_behind_training(
    family: str, drafter: str, tmp_path: Path
) -> None:
    make_target(tmp_path / "target", family)
    path, head = tmp_path / "target", HEADS[drafter]
    target, texts = FrozenTarget.load(path, CPU, torch.float32, 256), texts_of(record_run(tmp_path / "texts", path))
    module = head.build(target, texts, seed=0)
    prover = Prover.of(path, torch.from_numpy(texts.texts[0].ids), 4, head)
    head.save(module, target, tmp_path / "before")
    before = prover.prove(tmp_path / "before")
    trained, _ = losses(head, target, texts, tmp_path / "no.pt", num_steps=2)
    head.save(trained, target, tmp_path / "after")
    after = prover.prove(tmp_path / "after")
    prover.write_layouts(LAYOUTS.get(drafter, []), tmp_path / "after")
    assert len(after.differences) == 4 and after.largest_logit != before.largest_logit > 0.1


def test_all_heads_are_proved_here() -> None:
    """The presets of a block differ in their parts alone (`test_train_blocks.py`)."""
    assert set(KINDS) - set(HEADS) == {"domino", "lilicorr"}


def test_a_head_that_is_served_in_16_bits_is_proved_within_what_they_round(llama: Path) -> None:
    path, texts = llama / "target", texts_of(llama / "texts")
    target = FrozenTarget.load(path, CPU, torch.float32, 256)
    EAGLE3.save(EAGLE3.build(target, texts, 0), target, llama / "head")
    prover = Prover.of(path, torch.from_numpy(texts.texts[0].ids), 3, EAGLE3)
    assert 1e-4 < prover.prove_rounded(llama / "head", CPU) < 0.05
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NotServed, match="served in bfloat16"):
        patch.setattr(Eagle3, "taps", lambda *_: (Tap(0), Tap(1), Tap(6)))
        prover.prove_rounded(llama / "head", CPU)


class Killed(BaseException):
    """Ends a training as SIGKILL does: nothing is written behind it."""


def test_a_training_that_is_killed_goes_on_as_if_it_had_not_been(
    llama: Path, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Truth.look

    def killed(truth: Truth, step: int) -> None:
        if step == 4:
            raise Killed
        look(truth, step)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Truth, "look", killed)
        train(llama)
    assert (llama / "out" / "work" / "checkpoint.pt").exists()
    shutil.copytree(llama / "out" / "work" / "best", llama / "out" / "work" / "best-4")  # killed a moment later
    with pytest.raises(UserError, match="begun with other settings"):
        train(llama, seed=1)
    resumed, (_, undisturbed) = train(llama), whole
    assert all(resumed[name] == undisturbed[name] for name in ("losses", "points", "lines", "best_step"))


def train_as_rank(rank: int, port: int, printed: Path, folder: Path) -> None:
    """Train as one of two processes that torchrun starts, and write down what it prints."""
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in of_torchrun.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with printed.open("w") as out, redirect_stdout(out), redirect_stderr(out):
        evaluation = dataclasses.replace(small(folder, EAGLE3, folder).evaluation, every=6)
        train_head(small(folder / "target", EAGLE3, folder / "texts", evaluation=evaluation), folder / "out")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_of_torchrun_train_what_one_does(llama: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    """They are forks of this one, which spares their imports."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    printed, start = [llama / "printed-0", llama / "printed-1"], multiprocessing.get_context("fork").Process
    processes = [start(target=train_as_rank, args=(rank, port, printed[rank], llama)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0, 0], [path.read_text() for path in printed]
    finally:
        for process in processes:
            process.kill()
    together, (_, alone) = json.loads((llama / "out" / "training.json").read_text()), whole
    assert together["processes"] == 2
    for (step, loss), (expected_step, expected) in zip(together["losses"], alone["losses"], strict=True):
        assert step == expected_step and loss == pytest.approx(expected, abs=1e-5)


def test_figures_go_to_wandb_while_a_head_is_trained(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lengths, and the loss, by step."""
    rows: list[dict[str, Any]] = []

    class Run:
        def log(self, row: dict[str, Any]) -> None:
            rows.append(row)

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def finish(self) -> None: ...

    monkeypatch.setattr("wandb.init", lambda **how: Run())
    train(llama, wandb="heads")
    measured = [row for row in rows if "decoded/acceptance_length" in row]
    assert [row["step"] for row in measured] == [2, 4, 6] == [row["step"] for row in rows if "loss" in row]
    assert all("teacher_forced/acceptance_length" in row and "ngram/acceptance_length" in row for row in measured)


def test_hidden_states_are_collected_for_whoever_trains_elsewhere(llama: Path) -> None:
    config = CollectConfig(
        target=TargetChoice("hf", str(llama / "target")), data=str(llama / "texts"), tokens_per_file=300
    )
    (llama / "states").mkdir()
    collect(config, llama / "states")
    assert json.loads((llama / "states" / "header.json").read_text())["layers"]["hidden_states"] == [2, 4, 5]
    files = sorted((llama / "states").glob("*.safetensors"))
    files[1].unlink()
    collect(config, llama / "states")
    parts = [load_file(file) for file in files]
    texts = texts_of(llama / "texts").texts
    model = AutoModelForCausalLM.from_pretrained(llama / "target", trust_remote_code=False)
    ids = torch.cat([part["tokens"] for part in parts])
    assert len(parts) > 1 and ids.tolist() == [token for text in texts for token in text.ids.tolist()]
    start = sum(len(text.ids) for text in texts[:2])
    with torch.no_grad():
        states = model(torch.from_numpy(texts[2].ids)[None].long(), output_hidden_states=True).hidden_states
    kept, last = (
        torch.cat([part[name] for part in parts])[start : start + len(texts[2].ids)].float()
        for name in ("taps", "final_hidden")
    )
    expected = torch.cat([states[index] for index in (2, 4, 5)], dim=-1)[0]
    torch.testing.assert_close(kept, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(last, states[-1][0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("drafter", "block_size"), [("dflash", 33), ("dspark", 64)])
def test_a_block_that_reaches_far_behind_a_sequence_is_proved(drafter: str, block_size: int, llama: Path) -> None:
    path, texts = llama / "target", texts_of(llama / "texts")
    target = FrozenTarget.load(path, CPU, torch.float32, 256)
    head: Any = dataclasses.replace(HEADS[drafter], block_size=block_size)  # type: ignore[call-arg]
    head.save(head.build(target, texts, seed=0), target, llama / "untrained")
    proof = Prover.of(path, torch.from_numpy(texts.texts[0].ids), 3, head).prove(llama / "untrained")
    assert max(proof.differences) < 1e-5


def test_the_command_makes_its_own_texts_and_a_head(tmp_path: Path) -> None:
    """All of it: a target without prompts writes them, answers them, and a head learns from that."""
    words = "target=pocket drafter=eagle3 texts.num=24 texts.max_new_tokens=12 texts.batch_size=8 row_length=64 seed=2"
    words += " held_out_share=0.2 evaluation.max_new_tokens=8 optimisation.num_steps=2 optimisation.num_warmup_steps=1"
    words += " optimisation.batch_size=2 drafter.num_unrolled_steps=2 device=cpu hydra.run.dir=head"
    done = subprocess.run(
        [sys.executable, "-m", "spec_lab.train", *words.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "head")
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["data"][0]["workload"] == "outputs" and record["steps"] == 2 and record["texts"] > 10
    refused = subprocess.run(
        [sys.executable, "-m", "spec_lab.train", *words.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "has a finished head" in refused.stderr


def test_prompts_of_a_file_are_answered_by_the_target(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run writes is what is read; a killed training does not ask again, but one of other texts does."""
    asked: list[Path | None] = []

    def write(config: Any, prompts: Path | None, output: Path, device: torch.device) -> Path:
        asked.append(prompts)
        return record_run(output / "texts", llama / "target")

    monkeypatch.setattr(serving, "write_texts", write)
    (llama / "prompts.jsonl").write_text('{"prompt": "How tall is it?"}\n')
    config = small(llama / "target", EAGLE3, llama / "prompts.jsonl", optimisation=Optimisation(num_steps=1))
    for _ in range(2):
        runs, held_out = serving.runs_of(config, llama / "out", llama / "target", CPU, ALONE)
    assert asked == [llama / "prompts.jsonl"] and held_out is None
    assert [run.folder for run in runs] == [llama / "out" / "texts" / "texts"]
    config.texts.temperature = 0.7
    serving.runs_of(config, llama / "out", llama / "target", CPU, ALONE)
    assert len(asked) == 2
