"""MTP modules: unrolled against drafting one token after another, the checkpoint, and where they agree with a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spec_lab.core.errors import UserError
from spec_lab.train.drafter_config import MtpTrainingConfig
from spec_lab.train.module_config import LayerConfig, OptimisationConfig
from spec_lab.train.mtp import MtpDrafter, TrainableMtpModule
from spec_lab.train.mtp_recipe import MtpRecipe, load_modules, qwen3_shape, save_modules
from tests.one_row import OneRowAttention, feed_forward, norm

HIDDEN_SIZE, VOCAB_SIZE, NUM_LAYERS = 12, 6, 8
TARGET = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN_SIZE,
    intermediate_size=16,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    initializer_range=0.5,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
SHAPE = qwen3_shape(TARGET, LayerConfig(intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=6))
OPTIMISATION = OptimisationConfig(num_steps=2, batch_size=1, peak_learning_rate=0.1, num_warmup_steps=1)
both_variants = pytest.mark.parametrize("num_modules", [1, 3])


def recipe(num_modules: int) -> MtpRecipe:
    return MtpRecipe(
        MtpTrainingConfig(
            name="mtp",
            num_modules=num_modules,
            intermediate_size=20,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            num_unrolled_steps=3,
            step_loss_decay=0.8,
            optimisation=OPTIMISATION,
        )
    )


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(7)
    model = Qwen3ForCausalLM(TARGET).eval().requires_grad_(False)
    model.model.norm.weight.uniform_(0.5, 2.0)
    return model


def random_drafter(model: Qwen3ForCausalLM, num_modules: int) -> MtpDrafter:
    torch.manual_seed(3)
    drafter = MtpDrafter(SHAPE, num_modules, model.get_output_embeddings().weight)
    for name, parameter in drafter.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.5)
    return drafter.bfloat16().float().requires_grad_(False)


class OneRowModule:
    """A reference: one module and its cache, a row at a time."""

    def __init__(self, module: TrainableMtpModule) -> None:
        self.module = module
        self.attention = OneRowAttention(module.self_attn, SHAPE.plan.rope.theta, SHAPE.rms_norm_eps)

    def row(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        """Appends a row and returns the hidden state it leaves."""
        module, eps = self.module, SHAPE.rms_norm_eps
        pair = torch.cat([norm(embedding, module.enorm.weight, eps), norm(hidden, module.hnorm.weight, eps)])
        joined = module.eh_proj.weight @ pair
        joined = joined + self.attention.row(norm(joined, module.input_layernorm.weight, eps), position)
        joined = joined + feed_forward(module.mlp, norm(joined, module.post_attention_layernorm.weight, eps))
        return norm(joined, module.shared_head.norm.weight, eps)


def hidden_after(
    drafter: MtpDrafter, embeddings: Tensor, target_hidden: Tensor, chain: list[Tensor], anchor: int
) -> Tensor:
    """The hidden states that the step leaves which follows those in `chain`, from `anchor`; nothing is kept between
    calls.

    Row p of the embeddings is that of token p+1. The module sees the true pairs, then those of the chain.
    """
    modules = drafter.chain()
    module = OneRowModule(modules[len(chain) if len(modules) > 1 else 0])
    for position in range(anchor + 1):
        left = module.row(embeddings[position], target_hidden[position], position)
    for position, hidden in enumerate(chain, start=anchor + 1):
        left = module.row(embeddings[position], hidden, position)
    return left


@both_variants
def test_unrolled_rows_equal_drafting_step_by_step(model: Qwen3ForCausalLM, num_modules: int) -> None:
    num_rows, num_steps = 7, 3
    torch.manual_seed(1)
    drafter = random_drafter(model, num_modules).double()
    embeddings = torch.randn(num_rows, HIDDEN_SIZE, dtype=torch.float64)
    target_hidden = torch.randn(num_rows, HIDDEN_SIZE, dtype=torch.float64)
    states = drafter.unroll(embeddings[None], (target_hidden[None],), num_steps)
    for anchor in range(num_rows):
        chain: list[Tensor] = []
        for step in range(min(num_steps, num_rows - anchor)):
            chain.append(hidden_after(drafter, embeddings, target_hidden, chain, anchor))
            # The unrolling keeps norms and rotations in float32.
            torch.testing.assert_close(states[step][0, anchor + step].double(), chain[-1], rtol=1e-4, atol=1e-4)


@both_variants
def test_checkpoint_has_the_names_and_config_that_the_runtime_loads(
    model: Qwen3ForCausalLM, num_modules: int, tmp_path: Path
) -> None:
    drafter = random_drafter(model, num_modules)
    save_modules(drafter, model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {
        "enorm": (12,),
        "hnorm": (12,),
        "eh_proj": (12, 24),
        "input_layernorm": (12,),
        "self_attn.q_proj": (24, 12),
        "self_attn.k_proj": (12, 12),
        "self_attn.v_proj": (12, 12),
        "self_attn.o_proj": (12, 24),
        "self_attn.q_norm": (6,),
        "self_attn.k_norm": (6,),
        "post_attention_layernorm": (12,),
        "mlp.gate_proj": (20, 12),
        "mlp.up_proj": (20, 12),
        "mlp.down_proj": (12, 20),
        "shared_head.norm": (12,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"model.layers.{NUM_LAYERS + index}.{name}.weight": shape
        for index in range(num_modules)
        for name, shape in expected.items()
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    expected_config = {
        "model_type": "qwen3",
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": num_modules,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }
    assert {key: config.get(key) for key in expected_config} == expected_config
    assert config["rope_parameters"]["rope_theta"] == 500.0
    described = recipe(num_modules).describe(tmp_path)
    assert described.kind == ("an MTP module" if num_modules == 1 else "a chain of 3 MTP modules")
    assert ("The same module takes every draft step" in described.reading) == (num_modules == 1)
    loaded = load_modules(tmp_path, model)
    assert loaded.shape == SHAPE
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@both_variants
def test_matches_are_those_of_drafting_from_every_position(
    model: Qwen3ForCausalLM, num_modules: int, tmp_path: Path
) -> None:
    """The evaluation knows the text; a drafter knows its own drafts. Up to the first mismatch that is the same."""
    drafter = random_drafter(model, num_modules)
    save_modules(drafter, model, tmp_path)
    torch.manual_seed(12)
    tokens = torch.randint(VOCAB_SIZE, (2, 12))
    matches = recipe(num_modules).matcher(tmp_path, model, torch.device("cpu"))(tokens, 3)

    drafter, embedding = drafter.double(), model.get_input_embeddings().weight.double()
    target_hidden = model.model(tokens).last_hidden_state.double()
    lengths = []
    for row, text in enumerate(tokens.tolist()):
        for anchor in range(len(text) - 2):
            chain: list[Tensor] = []
            agreed = 0
            while agreed < 3 and anchor + 2 + agreed < len(text):
                known = embedding[text[1 : anchor + 2 + agreed]]
                chain.append(hidden_after(drafter, known, target_hidden[row], chain, anchor))
                if int((embedding @ chain[-1]).argmax()) != text[anchor + 2 + agreed]:
                    break
                agreed += 1
            assert int(matches[row, anchor].int().cumprod(0).sum()) == agreed, (row, anchor)
            lengths.append(agreed)
    assert {0, 1, 2} <= set(lengths), "the case should hold drafts of several lengths"


def test_more_drafts_than_modules_are_refused(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    save_modules(random_drafter(model, 3), model, tmp_path)
    match = recipe(num_modules=3).matcher(tmp_path, model, torch.device("cpu"))
    with pytest.raises(UserError, match="num_draft_tokens=4"):
        match(torch.randint(VOCAB_SIZE, (1, 8)), 4)
