"""`python -m spec_lab.train debug=smoke`, with both targets: every stage on a CPU, loaded again, skipped afterwards."""

from __future__ import annotations

import json
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
OF_A_CARD = {
    "mtp_vanilla": ("A chain of 3 MTP modules of",),
    "frozen_kv": ("A frozen-KV drafter", "layers 3, 5, 7"),
    "draft_model": ("A draft model",),
}
"""What the cards of drafters say."""


def smoke_pipeline(output_dir: Path, *overrides: str) -> Pipeline:
    return composed_pipeline("debug=smoke", f"output_dir={output_dir}", *overrides)


def composed_pipeline(*overrides: str) -> Pipeline:
    return build_pipeline(composed_config(*overrides))


def composed_config(*overrides: str) -> TrainConfig:
    store_schemas(SCHEMAS)
    with initialize_config_dir(str(train_folder().absolute()), version_base="1.3"):
        return config_of(compose("config", list(overrides)))


def test_every_stage_of_a_new_target(tmp_path: Path) -> None:
    folder = smoke_pipeline(tmp_path, "target=pocket").run()
    the_target_loads_as_any_checkpoint_does(folder)
    the_head_fits_its_target(folder)
    the_evaluation_reports_every_category(folder)
    the_cards_give_recipe_figures_and_limits(folder)
    a_folder_begun_with_another_recipe_is_refused(folder)
    finished_stages_are_skipped_and_a_missing_one_is_built_again(folder)


def the_target_loads_as_any_checkpoint_does(run_folder: RunFolder) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run_folder.target, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(run_folder.target, trust_remote_code=False)
    assert model.config.model_type == "qwen3" and model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings and model.config.vocab_size == len(tokenizer)
    stops = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == stops
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True)
    assert tokenizer.decode(ids["input_ids"]) == "<|user|>\n2 + 2?<|end|>\n<|assistant|>\n"


def the_head_fits_its_target(run_folder: RunFolder) -> None:
    target = json.loads((run_folder.target / "config.json").read_text())
    head = json.loads((run_folder.drafter("eagle3") / "config.json").read_text())
    assert head["hidden_size"] == target["hidden_size"] and head["vocab_size"] == target["vocab_size"]
    assert head["draft_vocab_size"] < head["vocab_size"]


def the_evaluation_reports_every_category(run_folder: RunFolder) -> None:
    report = json.loads(run_folder.evaluation(run_folder.drafter("eagle3")).read_text())
    assert set(report["by_category"]) >= {"arithmetic", "lists", "trace", "dates", "units", "order", "lookup", "code"}
    assert report["pooled"]["acceptance_length"] >= 1.0
    assert report["by_category"]["code"]["accuracy"] is None
    curve = json.loads((run_folder.records / "pocket.json").read_text())["curve"]
    assert [point["step"] for point in curve] == [2, 4, 6]


def finished_stages_are_skipped_and_a_missing_one_is_built_again(run_folder: RunFolder) -> None:
    target = run_folder.target / "model.safetensors"
    head = run_folder.drafter("eagle3") / "model.safetensors"
    before, weights = target.stat().st_mtime_ns, head.read_bytes()
    for file in run_folder.drafter("eagle3").iterdir():
        file.unlink()
    run_folder.drafter("eagle3").rmdir()
    smoke_pipeline(run_folder.root, "target=pocket").run()
    assert target.stat().st_mtime_ns == before
    assert head.read_bytes() == weights


def a_folder_begun_with_another_recipe_is_refused(run_folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="a different num_natural_documents; choose another output_dir"):
        smoke_pipeline(run_folder.root, "target=pocket", "corpus.num_natural_documents=11").run()
    with pytest.raises(ValueError, match="a different seed"):
        smoke_pipeline(run_folder.root, "target=pocket", "seed=1").run()


def the_cards_give_recipe_figures_and_limits(run_folder: RunFolder) -> None:
    target = (run_folder.target / "README.md").read_text()
    head = (run_folder.drafter("eagle3") / "README.md").read_text()
    assert "6 steps of 4 rows" in target and "4 steps of 4 rows" in head
    for card in (target, head):
        assert "    python -m spec_lab.train target=pocket drafter=eagle3\n" in card
        assert "| arithmetic |" in card and "What these figures do not say" in card and "PSF License" in target


def test_a_stage_that_fails_leaves_no_output(tmp_path: Path) -> None:
    output = tmp_path / "stage"
    with pytest.raises(KeyboardInterrupt), finished_folder(output) as unfinished:
        (unfinished / "half").write_text("x")
        raise KeyboardInterrupt
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


def test_drafters_for_the_shipped_target_train_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for drafter in ("mtp_vanilla", "frozen_kv"):
        folder = smoke_pipeline(tmp_path, f"drafter={drafter}").run()
    is_ended_and_goes_on(folder, "draft_model", monkeypatch, capsys)
    assert folder.target == ZOO / "pocket"
    made = {path.name for path in folder.root.iterdir()} - {LOG_FILE}
    assert made == {"generations", "records", "checkpoints"} | {f"pocket-{drafter}" for drafter in OF_A_CARD}
    texts = folder.generations / "generations.safetensors"
    for drafter, words in OF_A_CARD.items():
        assert texts.stat().st_mtime_ns < (folder.drafter(drafter) / "model.safetensors").stat().st_mtime_ns
        report = json.loads(folder.evaluation(folder.drafter(drafter)).read_text())
        card = (folder.drafter(drafter) / "README.md").read_text()
        assert all(fragment in card for fragment in (*words, f"    python -m spec_lab.train drafter={drafter}\n"))
        assert report["pooled"]["acceptance_length"] >= 1.0
        assert f"{report['pooled']['acceptance_length']:.2f}" in card
    config, target = (
        json.loads((path / "config.json").read_text()) for path in (folder.drafter("mtp_vanilla"), folder.target)
    )
    own = {"intermediate_size", "head_dim", "num_nextn_predict_layers", "transformers_version"}
    assert {key: config[key] for key in config.keys() - own} == {key: target[key] for key in target.keys() - own}
    texts_of_another_target_are_refused(folder)


def is_ended_and_goes_on(
    folder: RunFolder, drafter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is no number, and Ctrl-C behind a checkpoint, leave no weights."""
    arguments = ["debug=smoke", f"drafter={drafter}", f"output_dir={folder.root}"]
    weights, checkpoint = folder.drafter(drafter), folder.root / "checkpoints" / f"pocket-{drafter}.pt"
    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, Loss.kl, lambda logits, _: logits.sum(-1) * float("nan"))
        assert main(arguments) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("failed: the loss of step 1 is nan; lower")
    record = json.loads(folder.record(weights).read_text())
    assert record["failure"].startswith("the loss of step 1 is nan")
    assert not list(folder.root.glob(f"pocket-{drafter}*")) and not folder.evaluation(weights).exists()

    def interrupted(optimisation: Any, step: int, elapsed: float) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return learning_rate(optimisation, step, elapsed)

    learning_rate = loop.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", interrupted)
        assert main([*arguments, "drafter.optimisation.peak_learning_rate=1e-3"]) == 130
    assert "the same command continues from here" in capsys.readouterr().err
    assert checkpoint.exists() and not weights.exists()
    assert main([*arguments, "drafter.optimisation.peak_learning_rate=1e-3"]) == 0
    assert "at step 2" in (folder.root / LOG_FILE).read_text()
    assert not list(checkpoint.parent.iterdir())


def texts_of_another_target_are_refused(folder: RunFolder) -> None:
    file = folder.record(folder.generations)
    record = json.loads(file.read_text())
    record["recipe"]["target"] = "0" * 64
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="a different target; choose another output_dir"):
        smoke_pipeline(folder.root, "drafter=mtp_eagle").run()
