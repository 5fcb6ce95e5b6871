"""A head for any target: what trains and what serves it compute the same, for tiny targets of several families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.checkpoint import stored_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.taps import Tap
from spec_lab.train.__main__ import main
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter_config import Eagle3TrainingConfig, MtpEagleTrainingConfig
from spec_lab.train.eagle3_recipe import Eagle3Recipe
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_training import HeadRecipe
from spec_lab.train.mtp_recipe import MtpRecipe
from spec_lab.train.proof import Prover
from spec_lab.train.texts.folder import Answered, Texts, TextsFolder
from spec_lab.train.texts.header import TextsHeader, WrittenBy, digest_of_weights
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_gemma4 import make_tiny_gemma4
from tests.tiny_runs import write_prompts, write_tokenizer

SMALL = [
    *("device=cpu", "packing.row_length=48", "packing.held_out=0.2", "evaluation.max_new_tokens=8"),
    *("evaluation.num_draft_tokens=3", "evaluation.every=4", "drafter.num_unrolled_steps=3"),
    *("drafter.optimisation.num_steps=6", "drafter.optimisation.batch_size=2", "drafter.optimisation.log_every=2"),
    *("drafter.optimisation.num_warmup_steps=2", "drafter.optimisation.checkpoint_every=3"),
    "drafter.optimisation.max_seconds=null",
]
CPU = torch.device("cpu")
RECIPES: dict[str, Any] = {
    "eagle3": Eagle3Recipe(Eagle3TrainingConfig(draft_vocab_size=40, intermediate_size=24, head_dim=8)),
    "mtp_eagle": MtpRecipe(MtpEagleTrainingConfig(intermediate_size=24, head_dim=8)),
}
EAGLE3 = ["drafter=eagle3", "drafter.draft_vocab_size=40"]


def write_texts(target: Path, folder: Path, num_texts: int = 24) -> Path:
    """Write texts that no target wrote, as if this one had."""
    config: ModelConfig = read_model_config(target)
    by = WrittenBy("tiny", digest_of_weights(target), "", "", config.vocab_size)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(14, 40, (num_texts,), generator=generator).tolist()
    answers = [
        Answered(torch.randint(3, config.vocab_size, (length,), generator=generator).tolist(), 5, index)
        for index, length in enumerate(lengths)
    ]
    TextsFolder(folder, TextsHeader(by, {})).add_answers("answers-00000.safetensors", answers, {"kept": num_texts})
    return folder


def words(tmp_path: Path, *more: str) -> list[str]:
    """Return the words of a training of a tiny head, for the target and the texts in a folder."""
    places = [f"target.path={tmp_path / 'target'}", f"texts={tmp_path / 'texts'}", f"output_dir={tmp_path / 'out'}"]
    return ["target=hf", *places, *SMALL, *more]


def record_of(tmp_path: Path, name: str = "hf-eagle3") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "out" / "records" / f"{name}.json").read_text())
    return record


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a tiny Llama and its texts."""
    make_tiny_target(tmp_path / "target", "llama")
    write_texts(tmp_path / "target", tmp_path / "texts")
    return tmp_path


def test_a_head_is_proved_trained_watched_and_proved_again(llama: Path) -> None:
    questions = [{"question_id": 1, "category": name, "turns": ["aabb"]} for name in ("maths", "writing")]
    file = write_prompts(llama / "questions.jsonl", questions)
    write_tokenizer(llama / "target")
    assert main(words(llama, *EAGLE3, f"evaluation.prompts=[{file}]")) == 0
    record = record_of(llama)
    assert [point["step"] for point in record["truth"]["points"]] == [4, 6]
    assert set(record["truth"]["lines"]) == {"ngram", "untrained"}
    for point in record["truth"]["points"]:
        assert len(point["decoded"]["conditional_rates"]) == 3 and point["decoded"]["interval"]
    card = (llama / "out" / "hf-eagle3" / "README.md").read_text()
    assert "| ngram |" in card and "| writing | eagle3 |" in card
    assert max(record["proof"]["after"]["differences"]) < 1e-4 and record["proof"]["after"]["largest_logit"] > 0.1


def test_a_head_that_reads_another_layer_than_it_is_served_is_not_trained(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Eagle3Recipe, "taps", lambda *_: (Tap(0), Tap(3), Tap(4)))
    assert main(words(llama, *EAGLE3)) == 1
    assert "training forward and the runtime differ" in capsys.readouterr().err
    assert not (llama / "out" / "hf-eagle3").exists()


def test_a_large_drafter_lies_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_lab.train.checkpoint.MOST_FILE_BYTES", 200)
    tensors = {f"weight_{index}": torch.full((8, 8), float(index)) for index in range(3)}
    save_drafter(tensors, {"hidden_size": 8}, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 and (tmp_path / "model.safetensors.index.json").exists()
    loaded, _ = load_drafter(tmp_path)
    assert {name: float(tensor[0, 0]) for name, tensor in loaded.items()} == {f"weight_{i}": i for i in range(3)}
    assert set(stored_tensors(tmp_path)) == set(tensors)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [("qwen2", "mtp_eagle"), ("qwen3", "eagle3"), ("gemma4", "mtp_eagle"), ("gemma4", "eagle3")],
)
def test_heads_for_tiny_targets_of_other_families_are_proved(family: str, drafter: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target", family)
    path, target = tmp_path / "target", FrozenTarget.load(tmp_path / "target", CPU, torch.float32, 256)
    recipe: HeadRecipe = RECIPES[drafter]
    texts = Texts.load(write_texts(path, tmp_path / "texts"))
    head = recipe.build(target, texts, seed=0)
    recipe.save(head, target, tmp_path / "head")
    prover = Prover.of(path, texts.tokens, 4, recipe.load, recipe.taps(target))
    proof = prover.prove(drafter, tmp_path / "head")
    assert len(proof.differences) == 4 and proof.largest_logit > 0.1


def make_target(folder: Path, family: str) -> None:
    if family == "gemma4":
        make_tiny_gemma4(folder, "e2b")
    else:
        make_tiny_target(folder, family)  # type: ignore[arg-type]
