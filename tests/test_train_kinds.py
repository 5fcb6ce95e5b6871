"""Targets of every kind, and drafters of their own kinds: what is trained and saved is what the runtime computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spec_lab.core.types import AcceptanceInputs, Sequence
from spec_lab.train.assistant_recipe import assistant_keys, assistant_shape, load_assistant, start_from_gemma
from spec_lab.train.checkpoint import save_drafter
from spec_lab.train.drafter_config import AssistantTrainingConfig
from spec_lab.train.experts import BIAS_STEP, every_expert
from spec_lab.train.frozen_kv import TrainableFrozenKVDrafter
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.nextn import TargetKindModule
from spec_lab.train.nextn_recipe import load_module, save_module
from spec_lab.train.target import NextTokenLoss, TargetRecipe, new_model, run_target, save_target, sizes_of
from spec_lab.train.target_config import (
    NewTargetConfig,
    PocketGemmaTrainingConfig,
    PocketHybridTrainingConfig,
    PocketMoeTrainingConfig,
    PocketTrainingConfig,
)
from spec_lab.train.target_kinds import KINDS
from spec_lab.train.unroll import UnrolledDrafter
from tests.lab import Reference, make_config, make_engine, random_requests
from tests.scripted_rule import ScriptedAcceptance, install

CPU = torch.device("cpu")
VOCAB = 96
OPTIMISATION = OptimisationConfig(
    num_steps=20, batch_size=4, peak_learning_rate=1e-2, num_warmup_steps=10, log_every=1, checkpoint_every=100
)
SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "optimisation": OPTIMISATION}
HEADS: dict[str, Any] = SIZES | {"num_kv_heads": 2, "head_dim": 16}
TINY: dict[str, NewTargetConfig] = {
    "pocket": PocketTrainingConfig(**HEADS, num_layers=2),
    "pocket_hybrid": PocketHybridTrainingConfig(
        **HEADS, num_layers=4, num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12
    ),
    "pocket_gemma": PocketGemmaTrainingConfig(
        **HEADS | {"head_dim": 8},
        num_layers=6,
        full_attention_every=3,
        full_head_dim=16,
        window=10,
        num_shared_layers=3,
        per_layer_width=6,
    ),
    "pocket_moe": PocketMoeTrainingConfig(
        **SIZES,
        num_layers=3,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        num_experts=8,
        num_chosen=2,
        expert_size=20,
    ),
}
"""Every kind, each size another number."""


class Tokenizer:
    """What training asks of one."""

    def __len__(self) -> int:
        return VOCAB

    def convert_tokens_to_ids(self, token: str) -> int:
        return {"<|endoftext|>": 0, "<|end|>": 2}[token]


TOKENIZER: Any = Tokenizer()


def tiny_model(kind: str) -> Any:
    """A model as its training begins with it."""
    torch.manual_seed(0)
    model = new_model(KINDS[kind].keys(TINY[kind], VOCAB) | {"eos_token_id": 2, "pad_token_id": 0})
    KINDS[kind].prepare(model)
    return model


def randomise(module: nn.Module) -> None:
    """Give weights that tell any two of them apart."""
    torch.manual_seed(3)
    for name, tensor in module.state_dict().items():
        if not name.endswith(("A_log", "dt_bias", "layer_scalar")):
            tensor.add_(0.1 * torch.randn_like(tensor))


@dataclass
class SameLogits(ScriptedAcceptance):
    """Compares the target's logits of a round with those of transformers for the whole text."""

    reference: Reference = field(kw_only=True)
    compared: int = 0

    def check(self, sequence: Sequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        with torch.inference_mode():
            expected = self.reference.model(torch.tensor([[*sequence.tokens, *drafts]])).logits[0, -len(drafts) - 1 :]
        torch.testing.assert_close(inputs.logits[row], expected, rtol=0, atol=1e-4)
        self.compared += 1


@pytest.mark.parametrize("kind", TINY)
def test_training_learns_which_tokens_there_are_and_the_runtime_computes_what_was_saved(
    kind: str, tmp_path: Path
) -> None:
    """Losses fall from that of guessing in the vocabulary (4.6) to that of guessing in the tokens seen (2.1 to 2.8)."""
    random = np.random.default_rng(0)
    np.save(tmp_path / "rows.npy", random.integers(3, 11, (40, 96)).astype(np.uint16))
    np.save(tmp_path / "natural.npy", random.integers(11, 19, 2000).astype(np.uint16))
    folder = tmp_path / kind
    curve = TargetRecipe(TINY[kind]).train(TOKENIZER, tmp_path, folder, tmp_path / "checkpoint.pt", 0, CPU)
    assert curve[0].loss - curve[-1].loss > 1.5
    requests = random_requests(3, 8, vocab_size=8)  # so few tokens that texts repeat themselves, which are then drafts
    engine = make_engine(make_config((folder, folder), "ngram", 3, batch_size=2), requests)
    engine.parts.rule = rule = SameLogits(engine, reference=Reference(folder))
    engine.generate(requests)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared == len(rule.accepted)


@dataclass
class Unrolled:
    """A drafter as training unrolls it: each step is read off a text that ends with the drafts before it."""

    target: Any
    drafter: UnrolledDrafter

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[Tensor]]:
        tokens, all_logits = list(text), []
        for step in range(num_draft_tokens):
            rows = torch.tensor([[*tokens, 0]])  # the last row's own token is drafted, and read by none
            features = self.drafter.features(run_target(self.target, rows[:, :-1]))
            states = self.drafter.unroll(self.target.get_input_embeddings()(rows[:, 1:-1]), features, step + 1)
            all_logits.append(self.drafter.draft_logits(states[step][0, -1]))
            tokens.append(int(all_logits[-1].argmax()))
        return tokens[len(text) :], all_logits


def nextn(model: Any, folder: Path) -> tuple[UnrolledDrafter, UnrolledDrafter]:
    """A module as it is saved, and as it is read again."""
    module = TargetKindModule(model, 36).requires_grad_(False)
    randomise(module)
    save_module(module, model, 36, folder)
    return module, load_module(folder, model)


def assistant(model: Any, folder: Path) -> tuple[UnrolledDrafter, UnrolledDrafter]:
    """An assistant as it is saved, and as it is read again."""
    config = AssistantTrainingConfig(hidden_size=20, intermediate_size=28, num_heads=4, num_sliding_layers=2)
    keys = assistant_keys(config, model)
    drafter = TrainableFrozenKVDrafter(assistant_shape(sizes_of(model), keys["text_config"])).requires_grad_(False)
    start_from_gemma(drafter, model)
    randomise(drafter)
    save_drafter(drafter.state_dict(), keys, folder)
    return drafter, load_assistant(folder, model)


@pytest.mark.parametrize(
    ("kind", "drafts_as", "save"),
    [
        ("pocket_hybrid", "mtp_eagle", nextn),
        ("pocket_moe", "mtp_eagle", nextn),
        ("pocket_gemma", "frozen_kv", assistant),
    ],
)
def test_a_saved_drafter_drafts_in_the_engine_as_it_is_unrolled(
    kind: str, drafts_as: str, save: Any, tmp_path: Path
) -> None:
    """After rounds of every n, with its caches; what is read again is what was saved, rounded."""
    model = tiny_model(kind).requires_grad_(False)
    randomise(model)
    save_target(model, TOKENIZER, tmp_path / "target")
    model = Reference(tmp_path / "target").model
    saved, again = save(model, tmp_path / "drafter")
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, saved.state_dict()[name], rtol=2**-8, atol=0)
    requests = random_requests(3, 10, vocab_size=VOCAB)
    config = make_config((tmp_path / "target", tmp_path / "drafter"), drafts_as, 3, batch_size=2)
    engine = make_engine(config, requests)
    rule = install(engine, Unrolled(model, again.eval()))
    engine.generate(requests)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 10


def test_a_target_leaves_the_keys_of_whole_texts_to_a_drafter_whatever_its_window() -> None:
    model = tiny_model("pocket_gemma").eval().requires_grad_(False)
    tokens = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    keys_values = run_target(model, tokens).keys_values
    assert [tuple(keys.shape) for keys, _ in keys_values] == [(2, 2, 40, 8), (2, 2, 40, 8), (2, 2, 40, 16)]
    torch.testing.assert_close(run_target(model, tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", TINY)
def test_no_forward_asks_the_device_for_a_number(kind: str) -> None:
    """A GPU could not record it: on `meta` there are no numbers."""
    model, rows = tiny_model(kind).to("meta").train(), torch.zeros(2, 40, dtype=torch.long, device="meta")
    NextTokenLoss(model)(rows, rows[:, 1:]).backward()
    run_target(model.eval(), rows)


def test_every_expert_adds_up_to_those_that_a_row_has_chosen() -> None:
    experts = tiny_model("pocket_moe").model.layers[1].mlp.experts
    rows, weights = torch.randn(5, 24), torch.rand(5, 2)
    chosen = torch.tensor([[0, 1], [7, 2], [3, 4], [5, 6], [1, 0]])
    expected = torch.stack(
        [sum(weights[i, j] * of_one(experts, chosen[i, j], rows[i]) for j in (0, 1)) for i in range(5)]
    )
    torch.testing.assert_close(every_expert(experts, rows, chosen, weights), expected)


def of_one(experts: Any, expert: Tensor, row: Tensor) -> Tensor:
    gate, up = (experts.gate_up_proj[expert] @ row).chunk(2)
    return experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)


def test_a_router_moves_its_bias_towards_experts_that_are_chosen_too_seldom() -> None:
    model = tiny_model("pocket_moe")
    router = model.model.layers[1].mlp.gate
    nn.init.zeros_(router.weight)
    router.weight.data[:2] = 1.0
    router.train()(torch.ones(5, 24))
    moved = torch.full((8,), BIAS_STEP)
    moved[:2] = -BIAS_STEP
    torch.testing.assert_close(router.e_score_correction_bias, moved)
    router.eval()(torch.ones(5, 24))
    torch.testing.assert_close(router.e_score_correction_bias, moved)
