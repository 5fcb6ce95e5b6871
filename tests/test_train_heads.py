"""A head for any target: what trains and what serves it compute the same, for tiny targets of several families."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spec_lab.app.compose import conf_folder, store
from spec_lab.checkpoints.checkpoint import stored_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.taps import Tap
from spec_lab.collect.__main__ import main as collect
from spec_lab.core.errors import UserError
from spec_lab.options.drafters.block_keys import Head
from spec_lab.options.shipped import ZOO
from spec_lab.train.__main__ import main
from spec_lab.train.block_config import (
    BlockTrainingConfig,
    Dflash2TrainingConfig,
    DsparkTrainingConfig,
    PEagleTrainingConfig,
)
from spec_lab.train.blocks.p_eagle_recipe import PEagleRecipe
from spec_lab.train.blocks.recipe import BlockRecipe
from spec_lab.train.checkpoint import load_drafter, load_weights, save_drafter
from spec_lab.train.checks import refuse, sizes_of
from spec_lab.train.config import EvaluationConfig, TrainConfig
from spec_lab.train.draft_model_recipe import DraftModelRecipe
from spec_lab.train.drafter_config import (
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    MtpEagleTrainingConfig,
)
from spec_lab.train.eagle3_recipe import Eagle3Recipe
from spec_lab.train.fitting import filled
from spec_lab.train.frozen_kv_recipe import FrozenKVRecipe
from spec_lab.train.frozen_target import FrozenOutputs, FrozenTarget
from spec_lab.train.head_evaluation import evaluated
from spec_lab.train.head_pipeline import build_pipeline
from spec_lab.train.head_training import write_layouts
from spec_lab.train.layouts import WrittenFor
from spec_lab.train.loop import CurvePoint, Watch
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.mtp_recipe import MtpRecipe
from spec_lab.train.options import SCHEMAS, drafter_option
from spec_lab.train.packed_rows import PackedRows
from spec_lab.train.packed_training import PackedTask
from spec_lab.train.proof import NotServed, Proof, Prover
from spec_lab.train.serving import Serving
from spec_lab.train.texts.folder import Answered, Texts, TextsFolder
from spec_lab.train.texts.header import TextsHeader, WrittenBy, digest_of_weights
from spec_lab.train.truth import Truth
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_gemma4 import make_tiny_gemma4
from tests.tiny_latent import make_latent_target
from tests.tiny_runs import write_prompts, write_tokenizer

SMALL = [
    *("device=cpu", "packing.row_length=48", "packing.held_out=0.2", "evaluation.max_new_tokens=8"),
    *("evaluation.num_draft_tokens=3", "evaluation.every=2", "drafter.num_unrolled_steps=3"),
    *("drafter.optimisation.num_steps=6", "drafter.optimisation.batch_size=2", "drafter.optimisation.log_every=2"),
    *("drafter.optimisation.num_warmup_steps=2", "drafter.optimisation.checkpoint_every=3"),
    "drafter.optimisation.max_seconds=null",
]
CPU = torch.device("cpu")
OF_BLOCKS: dict[str, Any] = {"draft_vocab_size": 40, "num_anchors": 6}
OF_MARKOV: dict[str, Any] = {"head": Head.markov, "head_rank": 8, "alone_loss": 1.0}
OF_KV: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_unrolled_steps": 2, "kv_source_layers": []}
RECIPES: dict[str, Any] = {
    "eagle3": Eagle3Recipe(
        Eagle3TrainingConfig(draft_vocab_size=40, intermediate_size=24, head_dim=8, num_unrolled_steps=2)
    ),
    "mtp_eagle": MtpRecipe(MtpEagleTrainingConfig(intermediate_size=24, head_dim=8, num_unrolled_steps=2)),
    "draft_model": DraftModelRecipe(DraftModelTrainingConfig(intermediate_size=24, head_dim=8, hidden_size=16)),
    "frozen_kv": FrozenKVRecipe(FrozenKvTrainingConfig(**OF_KV)),
    "dspark": BlockRecipe(DsparkTrainingConfig(block_size=4, head_rank=8, num_anchors=6)),
    "dflash": BlockRecipe(BlockTrainingConfig(**OF_BLOCKS, **OF_MARKOV)),
    "dflash2": BlockRecipe(Dflash2TrainingConfig(block_size=5, head_rank=8, head_topk=4, **OF_BLOCKS)),
    "p_eagle": PEagleRecipe(PEagleTrainingConfig(num_drafts=4, **OF_BLOCKS)),
}
EAGLE3 = ["drafter=eagle3", "drafter.draft_vocab_size=40"]


def write_texts(target: Path, folder: Path, texts: Sequence[list[int]] | None = None) -> Path:
    """Write `texts` as if this target had, else some that no target wrote."""
    config: ModelConfig = read_model_config(target)
    by = WrittenBy("tiny", digest_of_weights(target), "", "", config.vocab_size)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(14, 40, (24,), generator=generator).tolist()
    texts = texts or [torch.randint(3, config.vocab_size, (each,), generator=generator).tolist() for each in lengths]
    answers = [Answered(text, 5, index) for index, text in enumerate(texts)]
    TextsFolder(folder, TextsHeader(by, {})).add_answers("answers-00000.safetensors", answers, {"kept": len(texts)})
    return folder


def composed_config(*overrides: str) -> TrainConfig:
    store(SCHEMAS)
    with initialize_config_dir(str(conf_folder() / "train"), version_base="1.3"):
        return OmegaConf.to_object(compose("config", list(overrides)))


def words(tmp_path: Path, *more: str) -> list[str]:
    """Return the words of a training of a tiny head, for the target and the texts in a folder."""
    places = [f"target.path={tmp_path / 'target'}", f"texts={tmp_path / 'texts'}", f"output_dir={tmp_path / 'out'}"]
    return ["target=hf", *places, *SMALL, *more]


def record_of(tmp_path: Path, name: str = "hf-eagle3") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "out" / "records" / f"{name}.json").read_text())
    return record


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and its texts, made once."""
    folder = tmp_path_factory.mktemp("made")
    make_tiny_target(folder / "target", "llama")
    write_texts(folder / "target", folder / "texts")
    return folder


@pytest.fixture
def llama(made: Path, tmp_path: Path) -> Path:
    """A folder with a tiny Llama and its texts."""
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training that was not disturbed, and with all that it may write."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("whole"), dirs_exist_ok=True))
    questions = [{"question_id": 1, "category": name, "turns": ["aabb"]} for name in ("maths", "writing")]
    file = write_prompts(folder / "questions.jsonl", questions)
    write_tokenizer(folder / "target")
    prove = Prover.prove

    def listed(self: Prover, name: str, head: Path) -> Proof:
        with (folder / "proved").open("a") as lines:
            lines.write(f"{head.name}\n")
        return prove(self, name, head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prover, "prove", listed)
        assert main(words(folder, *EAGLE3, f"evaluation.prompts=[{file}]", "layouts=[speculators]")) == 0
    return folder


def test_a_head_is_proved_trained_watched_and_proved_again(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, head = record_of(whole), whole / "out" / "hf-eagle3"
    proved = (whole / "proved").read_text().replace("hf-eagle3", "").split("\n")[:-1]
    assert proved == ["-before", "-untrained", "-2", "-4", "-6", ".unfinished"]
    assert [point["step"] for point in record["truth"]["points"]] == [2, 4, 6]
    assert set(record["truth"]["lines"]) == {"ngram", "untrained"}
    for point in record["truth"]["points"]:
        assert len(point["decoded"]["conditional_rates"]) == 3 and point["decoded"]["interval"]
    assert max(record["proof"]["after"]["differences"]) < 1e-4 and record["proof"]["after"]["largest_logit"] > 0.1
    card = (head / "README.md").read_text()
    assert "| ngram |" in card and "| writing | eagle3 |" in card
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight"}
    assert names < set(load_weights(head))
    config = json.loads((head / "speculators" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # of transformers' hidden_states, 0 the embedding
    assert "layers.0.hidden_norm.weight" in load_weights(head / "speculators")

    again = words(whole, *EAGLE3, "layouts=[speculators]")
    assert main(again) == 0
    (head / "speculators").rename(whole / "elsewhere")
    assert main(again) == 2
    assert "layouts=[speculators] is not in" in capsys.readouterr().err


def test_a_head_that_reads_another_layer_than_it_is_served_is_not_trained(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Eagle3Recipe, "taps", lambda *_: (Tap(0), Tap(3), Tap(4)))
    assert main(words(llama, *EAGLE3)) == 1
    assert "training forward and the engine differ" in capsys.readouterr().err
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
    [
        ("gemma4", "mtp_eagle"),
        ("gemma4", "eagle3"),
        ("gemma4", "draft_model"),
        ("qwen2", "frozen_kv"),
        ("gemma4", "frozen_kv"),
        ("llama", "dspark"),
        ("llama", "dflash"),
        ("qwen3", "dflash2"),
        ("gemma4", "p_eagle"),
    ],
)
def test_heads_for_tiny_targets_of_all_families_are_proved_before_and_behind_training(
    family: str, drafter: str, tmp_path: Path
) -> None:
    make_target(tmp_path / "target", family)
    path, target = tmp_path / "target", FrozenTarget.load(tmp_path / "target", CPU, torch.float32, 256)
    recipe = type(RECIPES[drafter])(filled(RECIPES[drafter].config, sizes_of(target.config)))
    texts = Texts.load(write_texts(path, tmp_path / "texts"))
    head = recipe.build(target, texts, seed=0)
    prover = Prover.of(path, texts.tokens, 4, recipe)
    recipe.save(head, target, tmp_path / "before")
    before = prover.prove(drafter, tmp_path / "before")
    steps = OptimisationConfig(num_steps=2, batch_size=2, num_warmup_steps=1, log_every=2, checkpoint_every=9)
    config = dataclasses.replace(recipe.config, optimisation=steps)
    recipe.form.train(head, config, PackedTask(target, texts, recipe.taps(target), 48, tmp_path / "no.pt", 0, CPU))
    recipe.save(head, target, tmp_path / "after")
    after = prover.prove(drafter, tmp_path / "after")
    layouts = [name for name, each in drafter_option(config).layouts.items() if each.lacks(config) is None]
    write_layouts(layouts, config, tmp_path / "after", WrittenFor(target, "it", recipe.taps(target)), prover)
    expected = {"dspark": ["speculators", "deepspec"]} | {
        key: ["speculators"] for key in ("eagle3", "dflash", "dflash2")
    }
    assert layouts == expected.get(drafter, [])
    assert len(after.differences) == 4 and after.largest_logit != before.largest_logit > 0.1


def test_a_head_that_is_served_in_16_bits_is_proved_within_what_they_round(llama: Path) -> None:
    path, recipe, texts = llama / "target", RECIPES["eagle3"], Texts.load(llama / "texts")
    target = FrozenTarget.load(path, CPU, torch.float32, 256)
    recipe.save(recipe.build(target, texts, 0), target, llama / "head")
    prover = Prover.of(path, texts.tokens, 3, recipe)
    serving = Serving.load(path, CPU, "bfloat16", 3, 1, 80, "kernels=torch")
    assert 1e-4 < prover.prove_rounded("eagle3", llama / "head", serving) < 0.05
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NotServed, match="served in bfloat16"):
        patch.setattr(Eagle3Recipe, "taps", lambda *_: (Tap(0), Tap(1), Tap(6)))
        prover.prove_rounded("eagle3", llama / "head", serving)


def make_target(folder: Path, family: str) -> None:
    if family == "gemma4":
        make_tiny_gemma4(folder, "e2b")
    else:
        make_tiny_target(folder, family)  # type: ignore[arg-type]


class Killed(BaseException):
    """Ends a training as SIGKILL does: nothing is written behind it."""


def test_a_training_that_is_killed_goes_on_as_if_it_had_not_been(
    llama: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Truth.look

    def killed(truth: Truth, step: int) -> None:
        if step == 4:
            raise Killed
        look(truth, step)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Truth, "look", killed)
        main(words(llama, *EAGLE3))
    assert (llama / "out" / "checkpoints" / "hf-eagle3.pt").exists()
    for left in ("hf-eagle3-before", "hf-eagle3-4"):  # killed a moment later, or earlier
        shutil.copytree(llama / "out" / "checkpoints" / "hf-eagle3", llama / "out" / "checkpoints" / left)
    assert main(words(llama, *EAGLE3)) == 0
    resumed, undisturbed = record_of(llama), record_of(whole)
    assert resumed["curve"] == undisturbed["curve"] and resumed["truth"] == undisturbed["truth"]


@dataclass
class KilledOnce:
    """Looks at a training behind its third step, and ends it the first time."""

    every: int = 3
    is_dead: bool = False

    def point(self, point: CurvePoint) -> None:
        """Do nothing."""

    def look(self, step: int) -> None:
        if not self.is_dead:
            self.is_dead = True
            raise Killed


def test_a_block_drafter_whose_training_is_killed_has_the_losses_of_one_that_was_not(llama: Path) -> None:
    watch = KilledOnce()
    with pytest.raises(Killed):
        losses(llama, name="p_eagle", watch=watch)
    assert losses(llama, name="p_eagle", watch=watch) == losses(llama, name="p_eagle")


def losses(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    kept_bytes: int = 0,
    name: str = "eagle3",
    watch: Watch | None = None,
) -> list[float]:
    """Return those of four steps of a tiny drafter for the target in a folder, which go over the texts more than once.

    A checkpoint is kept where something watches.
    """
    texts, target = Texts.load(folder / "texts"), FrozenTarget.load(folder / "target", CPU, dtype, 48)
    recipe = type(RECIPES[name])(filled(RECIPES[name].config, sizes_of(target.config)))
    every = 9 if watch is None else 2
    steps = OptimisationConfig(num_steps=4, batch_size=8, num_warmup_steps=2, log_every=1, checkpoint_every=every)
    config = dataclasses.replace(recipe.config, optimisation=steps)
    parts = recipe.taps(target), 48, folder / f"{name}-{every}.pt", 0, CPU, watch
    head = recipe.build(target, texts, 0)
    task = PackedTask(target, texts, *parts, kept_bytes=kept_bytes)
    return [point.loss for point in recipe.form.train(head, config, task)]


def test_states_that_are_kept_change_no_loss_and_are_not_made_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    run = FrozenTarget.run

    def counted(self: FrozenTarget, rows: PackedRows, taps: Sequence[Tap]) -> FrozenOutputs:
        num_rows.append(rows.num_rows)
        return run(self, rows, taps)

    monkeypatch.setattr(FrozenTarget, "run", counted)
    made_anew = losses(llama)
    row_bytes = 48 * 4 * 32 * 4  # of 15 rows, one of which stands twice in a batch
    for kept_bytes, expected in ((16 * row_bytes, 16), (5 * row_bytes, 25)):
        num_rows[:] = []
        assert losses(llama, kept_bytes=kept_bytes) == pytest.approx(made_anew, abs=1e-5)
        assert sum(num_rows) == expected


def test_a_cpu_computes_in_bfloat16_where_it_is_told_to(llama: Path) -> None:
    exact, rounded = losses(llama), losses(llama, dtype=torch.bfloat16)
    assert rounded == pytest.approx(exact, rel=2e-2) and rounded != pytest.approx(exact, rel=1e-5)


def train_as_rank(rank: int, port: int, printed: Path, typed: list[str]) -> None:
    """Run the command as one of two processes that torchrun starts, and write down what it prints."""
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in of_torchrun.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with printed.open("w") as out, redirect_stdout(out), redirect_stderr(out):
        sys.exit(main(typed))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_of_torchrun_train_what_one_does(llama: Path, whole: Path) -> None:
    """They are forks of this one, which spares their imports; `test_torchrun.py` has torchrun itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    printed, start = [llama / "printed-0", llama / "printed-1"], multiprocessing.get_context("fork").Process
    arguments = [(rank, port, printed[rank], words(llama, *EAGLE3, "evaluation.every=6")) for rank in range(2)]
    processes = [start(target=train_as_rank, args=each) for each in arguments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0, 0], [path.read_text() for path in printed]
    finally:
        for process in processes:
            process.kill()
    together, alone = record_of(llama), record_of(whole)
    assert together["num_processes"] == 2
    assert [path.read_text().count("step 6 loss") for path in printed] == [1, 0]
    card = (llama / "out" / "hf-eagle3" / "README.md").read_text()
    assert "s on 2 x cpu with torch" in " ".join(card.split())
    losses, expected = ([point["loss"] for point in record["curve"]] for record in (together, alone))
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("drafter.draft_vocab_size=161", "more than the target's 160"),
        ("drafter=dflash drafter.mask_token_id=160", "does not fit the target's 160 tokens"),
        ("dtype=float16", "cannot represent small gradients"),
        ("drafter.num_unrolled_steps=48", "packing.row_length=48 is too short for drafter.num_unrolled_steps=48"),
        (
            "drafter=mtp_eagle drafter.num_unrolled_steps=64",
            "; use packing.row_length=65",
        ),
        ("drafter.num_unrolled_steps=1 drafter.step_loss_decay=0.5", "step_loss_decay=0.5 is not read"),
        ("drafter=p_eagle drafter.slot_weights=dpace drafter.slot_decay=2", "slot_decay=2 is not read"),
        ("packing.row_length=1000000", "more than the target's 512 positions; lower it to 512"),
        ("evaluation.max_new_tokens=512", "leaves no room for a prompt in the target's 512 positions"),
        ("evaluation.max_new_tokens=511", "after a held-out prompt of"),
        ("logger.project=a/b", "is not the name of a W&B project"),
        ("logger.mode=offline", "logger.mode is not read without a project"),
        ("logger.entity=me", "logger.entity is not read without a project"),
        ("layouts=[deepspec]", "layouts=[deepspec] is not known for drafter=eagle3; use layouts=[speculators]"),
        ("drafter=dflash layouts=[deepspec]", "layouts=[deepspec] cannot hold drafter.slots=mask_first"),
        ("drafter=p_eagle layouts=[speculators]", "is not known for drafter=p_eagle; leave it out"),
        ("evaluation.prompts=[nowhere.jsonl]", "there is no file nowhere.jsonl"),
        (f"evaluation.prompts=[{ZOO / 'pocket' / 'config.json'}]", "config.json has no question"),
    ],
)
def test_what_cannot_be_trained_for_a_checkpoint_is_refused(word: str, reason: str, made: Path) -> None:
    chosen = [each for each in word.split() if each.startswith("drafter=")]
    config = copy.deepcopy(composed(made, *(chosen or EAGLE3)))
    for name, _, text in (each.partition("=") for each in word.split() if each not in chosen):
        *parents, last = name.split(".")
        part = reduce(getattr, parents, config)
        kind, value = type(getattr(part, last)), yaml.safe_load(text)
        setattr(part, last, kind(value) if issubclass(kind, Enum) else value)
    with pytest.raises(UserError, match=re.escape(reason)):
        refuse(config)
        build_pipeline(config).run()
    assert not (made / "out").exists()


@cache
def composed(folder: Path, *chosen: str) -> TrainConfig:
    """Return a training that is not refused; without the sizes of `SMALL` for another drafter."""
    return composed_config(*(word for word in words(folder, *chosen) if word in chosen or "drafter." not in word))


def test_a_category_named_as_all_of_them_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_prompts(llama / "q.jsonl", [{"question_id": 1, "category": "all", "turns": ["a"]}])
    assert main([*words(llama, *EAGLE3), f"evaluation.prompts=[{file}]"]) == 2
    assert "has a category all" in capsys.readouterr().err and not (llama / "out").exists()


def test_rows_that_have_room_for_prompts_alone_are_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = TextsHeader(Texts.load(llama / "texts").header.written_by, {})
    shutil.rmtree(llama / "texts")
    answers = [Answered([*range(3, 40)], 20, index) for index in range(4)]
    TextsFolder(llama / "texts", header).add_answers("answers-00000.safetensors", answers, {"kept": 4})
    assert main([*words(llama, *EAGLE3), "packing.row_length=16"]) == 2
    assert "no token of these counts; use packing.row_length=37" in capsys.readouterr().err


def test_targets_whose_layers_are_not_packed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_latent_target(tmp_path / "target")
    (tmp_path / "texts").mkdir()
    assert main(words(tmp_path, *EAGLE3)) == 2
    assert "latent attention" in capsys.readouterr().err


def test_hidden_states_are_collected_for_whoever_trains_elsewhere(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["target=hf", f"target.path={llama / 'target'}", f"texts={llama / 'texts'}", "device=cpu"]
    asked += [f"output_dir={llama / 'states'}", "tokens_per_file=300", "tokens_per_forward=100"]
    for layers in ("[3,7]", "[3,3]"):
        assert collect([*asked, f"layers={layers}"]) == 2 and "0 to 6" in capsys.readouterr().err
    for place in (f"output_dir={llama / 'texts'}", "device=gpu", "layers=3"):
        assert collect([*asked, place]) == 2 and place in capsys.readouterr().err
    assert collect(asked) == 0
    assert "260 bytes a token" in capsys.readouterr().out
    assert collect([*asked, "layers=[1]"]) == 2 and "header.json of another kind" in capsys.readouterr().err
    assert json.loads((llama / "states" / "header.json").read_text())["layers"]["hidden_states"] == [2, 4, 5]
    files = sorted((llama / "states").glob("*.safetensors"))
    os.truncate(files[1], 100)
    assert collect(asked) == 0, "a file that was cut short is written again"
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        assert collect(asked) == 0, "files that are there need no room"
        assert collect([*asked, f"output_dir={llama / 'others'}"]) == 2 and "has room for" in capsys.readouterr().err
    whole = files[0].rename(llama / "whole")
    for make in (os.mkfifo, os.mkdir):
        make(files[0])
        assert collect(asked) == 2 and f"{files[0].name} is not a file" in capsys.readouterr().err
        files[0].rename(llama / make.__name__)
    unfinished, header = files[0].with_suffix(".unfinished"), llama / "states" / "header.json"
    unfinished.mkdir()
    assert collect(asked) == 2 and f"{unfinished.name} is not a file" in capsys.readouterr().err
    unfinished.rmdir()
    whole.rename(files[0])
    header.rename(llama / "header")
    assert collect(asked) == 2 and "but no header.json" in capsys.readouterr().err
    (llama / "header").rename(header)
    parts = [load_file(file) for file in files]
    assert len(parts) > 1
    texts, model = (
        Texts.load(llama / "texts"),
        AutoModelForCausalLM.from_pretrained(llama / "target", trust_remote_code=False),
    )
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), texts.tokens)
    third = slice(int(texts.starts[2]), int(texts.starts[3]))
    with torch.no_grad():
        states = model(texts.text(2)[None].long(), output_hidden_states=True).hidden_states
    expected = torch.cat([states[index] for index in (2, 4, 5)], dim=-1)[0]
    kept, last = (torch.cat([part[name] for part in parts])[third].float() for name in ("taps", "final_hidden"))
    torch.testing.assert_close(kept, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(last, states[-1][0], rtol=1e-2, atol=1e-2)


def test_questions_that_are_too_long_behind_a_training_end_nothing(llama: Path, tmp_path: Path) -> None:
    write_tokenizer(llama / "target")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "How many?"}')
    knobs = EvaluationConfig(prompts=[str(tmp_path / "questions.jsonl")], max_new_tokens=512)
    assert evaluated(llama / "target", CPU, RECIPES["eagle3"].config, tmp_path, knobs, None) == {}


def test_a_plan_says_what_a_training_takes_and_texts_are_shown(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(llama / "target")
    assert main([*words(llama, *EAGLE3), "evaluation.num_draft_tokens=4", "--plan"]) == 0
    said = capsys.readouterr()
    assert "0.02 M parameters" in said.out and "steps: " in said.out and not (llama / "out").exists()
    warned = "evaluation.num_draft_tokens=4 is over drafter.num_unrolled_steps=3"
    assert warned in said.out + said.err
    assert main([*words(llama, *EAGLE3), "--show-data=2"]) == 0
    assert capsys.readouterr().out.count("[[") == 2 and not (llama / "out").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main([*words(llama, *EAGLE3), "--plan"]) == 2
    assert "a smaller drafter" in capsys.readouterr().err


def test_texts_of_another_target_are_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_target(llama / "target", "llama", seed=1)
    assert main(words(llama, *EAGLE3)) == 2
    assert "written by another target" in capsys.readouterr().err


@pytest.mark.parametrize(("drafter", "block_size"), [("dflash", 33), ("dspark", 64)])
def test_a_block_that_reaches_far_behind_a_sequence_is_proved(drafter: str, block_size: int, llama: Path) -> None:
    path, target = llama / "target", FrozenTarget.load(llama / "target", CPU, torch.float32, 256)
    sized = dataclasses.replace(RECIPES[drafter].config, block_size=block_size)
    recipe = type(RECIPES[drafter])(filled(sized, sizes_of(target.config)))
    texts = Texts.load(llama / "texts")
    recipe.save(recipe.build(target, texts, seed=0), target, llama / "untrained")
    proof = Prover.of(path, texts.tokens, 3, recipe).prove(drafter, llama / "untrained")
    assert max(proof.differences) < 1e-5
