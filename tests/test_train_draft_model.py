"""The draft model's distillation, its checkpoint in both loaders, and where it agrees with a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.selection import AllRows
from spec_lab.core.types import FeatureSpec
from spec_lab.engine.pages import PageTable
from spec_lab.models.decoder import DecoderTarget
from spec_lab.train.draft_model_recipe import DistillationLoss, DraftModelRecipe, distillation_batch
from spec_lab.train.drafter import TrainingTask
from spec_lab.train.drafter_config import DraftModelTrainingConfig
from spec_lab.train.generations import Generations
from spec_lab.train.losses import against_distribution
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.wiring.caches import cache_row
from tests.tiny_checkpoints import refused

VOCAB, LENGTH = 30, 14
CPU = torch.device("cpu")


def make_target(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "initializer_range": 0.5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "eos_token_id": 3,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(options | changes))).eval().requires_grad_(False)


def make_recipe(num_steps: int = 2) -> DraftModelRecipe:
    return DraftModelRecipe(
        DraftModelTrainingConfig(
            hidden_size=8,
            intermediate_size=16,
            num_layers=2,
            num_heads=3,
            num_kv_heads=1,
            head_dim=4,
            prompt_loss_weight=0.25,
            optimisation=OptimisationConfig(
                num_steps=num_steps,
                batch_size=4,
                peak_learning_rate=0.01,
                num_warmup_steps=1,
                weight_decay=0.0,
                log_every=num_steps // 2,
            ),
        )
    )


def train_on_random_texts(folder: Path, target: Qwen3ForCausalLM, recipe: DraftModelRecipe) -> list[float]:
    """Train, and return the loss curve; the weights are in `folder / "draft"`."""
    tokens = torch.randint(target.config.vocab_size, (4, LENGTH), dtype=torch.int16)
    texts = Generations(tokens, torch.full((4,), 4), torch.full((4,), LENGTH))
    task = TrainingTask(target, texts, [], folder / "checkpoint.pt", 0, CPU)
    return [point.loss for point in recipe.train(task, folder / "draft")]


def test_training_approaches_the_target(tmp_path: Path) -> None:
    losses = train_on_random_texts(tmp_path, make_target(), make_recipe(num_steps=60))
    assert losses[-1] < losses[0] - 0.3


def test_checkpoint_is_a_qwen3_model_that_both_loaders_run_alike(tmp_path: Path) -> None:
    target = make_target()
    train_on_random_texts(tmp_path, target, make_recipe())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32, trust_remote_code=False)
    assert isinstance(model, Qwen3ForCausalLM) and model.config.tie_word_embeddings
    for key in ("vocab_size", "max_position_embeddings", "rope_parameters", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, key) == getattr(target.config, key), key
    tokens = torch.randint(VOCAB, (LENGTH,))
    with torch.no_grad():
        torch.testing.assert_close(decoder_logits(tmp_path / "draft", tokens), model(tokens[None]).logits[0])
    saved = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"] and saved["dtype"] == "bfloat16"


def decoder_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits `[length, vocab]` of the lab's own decoder."""
    config = read_model_config(folder)
    backend = TorchAttention(4, config.max_position_embeddings)
    tensors = dict(open_tensors(folder, decoder_tensor_shapes(config), torch.float32, "cpu"))
    table = PageTable(1, len(tokens), 4, CPU)
    table.assign(0, [5, 4, 3, 2])
    cache = PagedKVCache([cache_row(plan) for plan in config.layers], 6, 4, torch.float32, CPU)
    model = DecoderTarget(config, tensors, backend)
    positions = torch.arange(len(tokens))[None]
    attention = backend.build(positions, torch.tensor([len(tokens)]), table.pages[:1], len(tokens))
    return model.logits(model.forward(tokens, cache, attention, AllRows(), FeatureSpec()).hidden)


def test_matches_are_those_of_drafting_from_every_position(tmp_path: Path) -> None:
    """The evaluation knows the text; a drafter knows its own drafts. Up to the first mismatch that is the same."""
    target = make_target(vocab_size=4)
    recipe = make_recipe(num_steps=20)
    train_on_random_texts(tmp_path, target, recipe)
    tokens = torch.randint(4, (3, 20))
    matches = recipe.matcher(tmp_path / "draft", target, CPU)(tokens, 3)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32, trust_remote_code=False)
    lengths = []
    for row, text in enumerate(tokens.tolist()):
        for anchor in range(len(text) - 2):
            drafts: list[int] = []
            while len(drafts) < 3 and anchor + 2 + len(drafts) < len(text):
                known = torch.tensor([text[: anchor + 2] + drafts])
                drafts.append(int(model(known).logits[0, -1].argmax()))
                if drafts[-1] != text[anchor + 1 + len(drafts)]:
                    drafts.pop()
                    break
            assert int(matches[row, anchor].int().cumprod(0).sum()) == len(drafts), (row, anchor)
            lengths.append(len(drafts))
    assert {0, 1, 2} <= set(lengths), "the case should hold drafts of several lengths"


def test_the_loss_weighs_what_the_target_wrote_and_the_prompt_less() -> None:
    target, recipe = make_target(), make_recipe()
    tokens = torch.randint(VOCAB, (1, 7), dtype=torch.int16)
    picked = Generations(tokens, torch.tensor([3]), torch.tensor([6]))
    rows, log_p, weights = distillation_batch(target, picked, recipe.config.prompt_loss_weight)
    # Token 3 is the first written one, predicted at position 2; token 6 lies behind the end.
    assert weights.tolist() == [[0.25, 0.25, 1.0, 1.0, 1.0, 0.0]]
    torch.testing.assert_close(log_p[0], target(tokens.long()).logits[0, :-1].log_softmax(-1))
    draft_model = Qwen3ForCausalLM(recipe.model_config(target.config)).eval()
    log_q = draft_model(tokens.long()).logits[0].log_softmax(-1)
    by_row = torch.stack([-(log_p[0, row].exp() * log_q[row]).sum() for row in range(6)])
    expected = (by_row * weights[0]).sum() / 3.5
    torch.testing.assert_close(DistillationLoss(draft_model, against_distribution)(rows, log_p, weights), expected)


def test_a_wider_model_than_the_target_is_refused(tmp_path: Path) -> None:
    with refused("drafter.hidden_size=8 is wider than the target's 6"):
        train_on_random_texts(tmp_path, make_target(hidden_size=6), make_recipe())
