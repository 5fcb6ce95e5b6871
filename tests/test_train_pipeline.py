"""`python -m spec_lab.train debug=smoke`, with both targets: every stage on a CPU, loaded again, skipped afterwards."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from spec_lab.options.shipped import ZOO
from spec_lab.program.compose import store_schemas
from spec_lab.train import loop
from spec_lab.train.__main__ import config_of, main
from spec_lab.train.config import TrainConfig
from spec_lab.train.drafter_config import Loss
from spec_lab.train.losses import LOSSES
from spec_lab.train.menu import train_folder, train_menu
from spec_lab.train.options import SCHEMAS
from spec_lab.train.output import LOG_FILE
from spec_lab.train.pipeline import Pipeline
from spec_lab.train.recipes import build_pipeline
from spec_lab.train.stages import RunFolder, finished_folder, run_stage
from spec_lab.train.target import load_target, save_target, without_progress_bars

DRAFTERS = sorted(set(train_menu().groups["drafter"].options) - {"none"})
MTP_DRAFTERS = ("mtp_eagle", "mtp_vanilla")
OF_A_CARD = {"frozen_kv": ("A frozen-KV drafter", "layers 3, 5, 7"), "draft_model": ("A draft model",)}
"""What the cards of other drafters say."""


def smoke_pipeline(output_dir: Path, *overrides: str) -> Pipeline:
    return composed_pipeline("debug=smoke", f"output_dir={output_dir}", *overrides)


def composed_pipeline(*overrides: str) -> Pipeline:
    return build_pipeline(composed_config(*overrides))


def composed_config(*overrides: str) -> TrainConfig:
    store_schemas(SCHEMAS)
    with initialize_config_dir(str(train_folder().absolute()), version_base="1.3"):
        return config_of(compose("config", list(overrides)))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return smoke_pipeline(tmp_path_factory.mktemp("train"), "target=pocket").run()


@pytest.fixture(scope="module")
def shipped_folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Drafters for the shipped target, trained one after the other in one folder."""
    output_dir = tmp_path_factory.mktemp("shipped")
    for drafter in (*MTP_DRAFTERS, *OF_A_CARD):
        folder = smoke_pipeline(output_dir, f"drafter={drafter}").run()
    return folder


def test_the_target_loads_as_any_checkpoint_does(run_folder: RunFolder) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run_folder.target, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(run_folder.target, trust_remote_code=False)
    assert model.config.model_type == "qwen3" and model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings and model.config.vocab_size == len(tokenizer)
    stops = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == stops
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True)
    assert tokenizer.decode(ids["input_ids"]) == "<|user|>\n2 + 2?<|end|>\n<|assistant|>\n"


def test_the_head_fits_its_target(run_folder: RunFolder) -> None:
    target = json.loads((run_folder.target / "config.json").read_text())
    head = json.loads((run_folder.drafter("eagle3") / "config.json").read_text())
    assert head["hidden_size"] == target["hidden_size"] and head["vocab_size"] == target["vocab_size"]
    assert head["draft_vocab_size"] < head["vocab_size"]


def test_the_evaluation_reports_every_category(run_folder: RunFolder) -> None:
    report = json.loads(run_folder.evaluation(run_folder.drafter("eagle3")).read_text())
    assert set(report["by_category"]) >= {"arithmetic", "lists", "trace", "dates", "units", "order", "lookup", "code"}
    assert report["pooled"]["acceptance_length"] >= 1.0
    assert report["by_category"]["code"]["accuracy"] is None
    curve = json.loads((run_folder.records / "pocket.json").read_text())["curve"]
    assert [point["step"] for point in curve] == [2, 4, 6]


def test_finished_stages_are_skipped_and_a_missing_one_is_built_again(run_folder: RunFolder) -> None:
    target = run_folder.target / "model.safetensors"
    head = run_folder.drafter("eagle3") / "model.safetensors"
    before, weights = target.stat().st_mtime_ns, head.read_bytes()
    for file in run_folder.drafter("eagle3").iterdir():
        file.unlink()
    run_folder.drafter("eagle3").rmdir()
    smoke_pipeline(run_folder.root, "target=pocket").run()
    assert target.stat().st_mtime_ns == before
    assert head.read_bytes() == weights


def test_a_folder_begun_with_another_recipe_is_refused(run_folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="a different num_natural_documents; choose another output_dir"):
        smoke_pipeline(run_folder.root, "target=pocket", "corpus.num_natural_documents=11").run()
    with pytest.raises(ValueError, match="a different seed"):
        smoke_pipeline(run_folder.root, "target=pocket", "seed=1").run()


def test_the_cards_give_recipe_figures_and_limits(run_folder: RunFolder) -> None:
    target = (run_folder.target / "README.md").read_text()
    head = (run_folder.drafter("eagle3") / "README.md").read_text()
    assert "6 steps of 4 rows" in target and "4 steps of 4 rows" in head
    for card in (target, head):
        assert "    python -m spec_lab.train target=pocket drafter=eagle3\n" in card
        assert "| arithmetic |" in card and "What these figures do not say" in card and "PSF License" in target


def test_a_stage_that_fails_leaves_no_output(tmp_path: Path) -> None:
    output = tmp_path / "stage"
    with pytest.raises(OSError), finished_folder(output) as unfinished:
        (unfinished / "half").write_text("x")
        raise OSError("disk full")
    assert not output.exists()
    with finished_folder(output) as unfinished:
        assert list(unfinished.iterdir()) == []
    assert output.is_dir()


def test_transformers_draws_no_bars_while_a_pipeline_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with without_progress_bars():
        model, tokenizer = load_target(ZOO / "pocket", torch.device("cpu"))
        save_target(model, tokenizer, tmp_path)
    assert capfd.readouterr().err == ""
    load_target(tmp_path, torch.device("cpu"))
    assert "Loading weights" in capfd.readouterr().err


def test_a_pipeline_runs_without_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers.utils import logging

    shown = []

    def note(*arguments: Any) -> None:
        shown.append(logging.is_progress_bar_enabled())
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_lab.train.pipeline.run_stage", note)
    with pytest.raises(KeyboardInterrupt):
        smoke_pipeline(tmp_path).run()
    assert shown == [False] and logging.is_progress_bar_enabled()


def test_without_a_drafter_only_the_target_is_described(tmp_path: Path) -> None:
    pipeline = composed_pipeline("target=pocket", "drafter=none", f"output_dir={tmp_path}")
    assert pipeline.drafter is None and pipeline.command() == "python -m spec_lab.train target=pocket drafter=none"


def test_a_drafter_for_the_shipped_target_trains_nothing_else(shipped_folder: RunFolder) -> None:
    assert shipped_folder.target == ZOO / "pocket"
    made = {path.name for path in shipped_folder.root.iterdir()} - {LOG_FILE}
    heads = {f"pocket-{drafter}" for drafter in (*MTP_DRAFTERS, *OF_A_CARD)}
    assert made == {"generations", "records", "checkpoints"} | heads
    for drafter, words in OF_A_CARD.items():
        report = json.loads(shipped_folder.evaluation(shipped_folder.drafter(drafter)).read_text())
        assert report["pooled"]["acceptance_length"] >= 1.0
        card = (shipped_folder.drafter(drafter) / "README.md").read_text()
        assert all(fragment in card for fragment in (*words, f"drafter={drafter}"))
    for drafter in MTP_DRAFTERS:
        config = json.loads((shipped_folder.drafter(drafter) / "config.json").read_text())
        target = json.loads((shipped_folder.target / "config.json").read_text())
        own = {"intermediate_size", "head_dim", "num_nextn_predict_layers", "transformers_version"}
        assert {key: value for key, value in config.items() if key not in own} == {
            key: value for key, value in target.items() if key not in own
        }


def test_drafters_of_one_folder_share_the_texts_and_keep_their_own_figures(shipped_folder: RunFolder) -> None:
    texts = shipped_folder.generations / "generations.safetensors"
    first = shipped_folder.drafter("mtp_eagle") / "model.safetensors"
    assert texts.stat().st_mtime_ns < first.stat().st_mtime_ns
    for drafter, kind in (("mtp_eagle", "An MTP module of"), ("mtp_vanilla", "A chain of 3 MTP modules of")):
        folder = shipped_folder.drafter(drafter)
        report = json.loads(shipped_folder.evaluation(folder).read_text())
        card = (folder / "README.md").read_text()
        assert kind in card and f"    python -m spec_lab.train drafter={drafter}\n" in card
        assert f"{report['pooled']['acceptance_length']:.2f}" in card


def test_texts_of_another_target_are_refused(shipped_folder: RunFolder, tmp_path: Path) -> None:
    record = json.loads(shipped_folder.record(shipped_folder.generations).read_text())
    record["recipe"]["target"] = "0" * 64
    tmp_path.joinpath("records").mkdir()
    tmp_path.joinpath("records", "generations.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="a different target; choose another output_dir"):
        smoke_pipeline(tmp_path, "drafter=mtp_eagle").run()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_has_a_smoke_setting(drafter: str) -> None:
    target = {"nextn": ["target=pocket_moe"], "assistant": ["target=pocket_gemma"]}.get(drafter, [])
    pipeline = smoke_pipeline(Path("unused"), f"drafter={drafter}", *target)
    assert (pipeline.target is None) == (not target), "only these are trained with their target"
    assert pipeline.drafter is not None and pipeline.drafter.config.name == drafter
    assert pipeline.drafter.config.optimisation.num_steps < 10


def test_of_several_runs_at_once_one_builds_a_stage_and_the_others_wait(tmp_path: Path) -> None:
    folder, num_built, missing = RunFolder(tmp_path), [], []

    def build(unfinished: Path) -> dict[str, Any]:
        num_built.append(1)
        time.sleep(0.2)
        return {}

    def run() -> None:
        run_stage(folder, folder.generations, {"seed": 0}, torch.device("cpu"), build)
        missing.append(not folder.generations.exists())

    runs = [threading.Thread(target=run) for _ in range(3)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert len(num_built) == 1 and missing == [False] * 3


def test_what_ends_a_training_saves_no_weights_and_the_next_command_goes_on(
    shipped_folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is no number, and Ctrl-C behind a checkpoint."""
    shutil.copytree(shipped_folder.generations, tmp_path / "generations")
    (tmp_path / "records").mkdir()
    shutil.copy(shipped_folder.record(shipped_folder.generations), tmp_path / "records")
    arguments = ["debug=smoke", f"output_dir={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, Loss.kl, lambda logits, _: logits.sum(-1) * float("nan"))
        assert main(arguments) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("failed: the loss of step 1 is nan; lower")
    record = json.loads((tmp_path / "records" / "pocket-eagle3.json").read_text())
    assert record["failure"].startswith("the loss of step 1 is nan")
    assert not list(tmp_path.glob("pocket-eagle3*")) and not list((tmp_path / "records").glob("*-evaluation.json"))

    def interrupted(optimisation: Any, step: int, elapsed: float) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return learning_rate(optimisation, step, elapsed)

    learning_rate = loop.learning_rate
    arguments.append("drafter.optimisation.peak_learning_rate=1e-3")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", interrupted)
        assert main(arguments) == 130
    assert "the same command continues from here" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "pocket-eagle3.pt").exists() and not (tmp_path / "pocket-eagle3").exists()
    assert main(arguments) == 0
    assert "at step 2" in (tmp_path / "spec_lab.train.log").read_text()
    assert (tmp_path / "pocket-eagle3" / "README.md").exists() and not list((tmp_path / "checkpoints").iterdir())
