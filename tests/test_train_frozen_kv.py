"""The frozen-KV drafter's unrolled forward against drafting one step after another, and the checkpoint it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spec_lab.train.drafter import TrainingTask
from spec_lab.train.drafter_config import FrozenKvTrainingConfig
from spec_lab.train.frozen_kv import TrainableFrozenKVDrafter
from spec_lab.train.frozen_kv_recipe import FrozenKVRecipe, load_frozen_kv, save_frozen_kv, start_from_target
from spec_lab.train.generations import Generations
from spec_lab.train.layers import leading_directions
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.target import run_target
from tests.tiny_checkpoints import refused

VOCAB, HIDDEN, HEAD_DIM, LENGTH = 30, 12, 6, 14
CPU = torch.device("cpu")


def make_target(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    options = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "initializer_range": 0.5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(options | changes))).eval().requires_grad_(False)


def make_recipe(kv_source_layers: list[int], **changes: Any) -> FrozenKVRecipe:
    options: dict[str, Any] = {
        "hidden_size": 10,
        "intermediate_size": 20,
        "num_heads": 4,
        "kv_source_layers": kv_source_layers,
        "num_unrolled_steps": 3,
        "step_loss_decay": 0.8,
        "optimisation": OptimisationConfig(num_steps=2, batch_size=2, peak_learning_rate=0.01, num_warmup_steps=1),
    }
    return FrozenKVRecipe(FrozenKvTrainingConfig(**(options | changes)))


def random_drafter(kv_source_layers: list[int], target: Qwen3ForCausalLM) -> TrainableFrozenKVDrafter:
    """Make a drafter in which every weight is random, norms and scalars too, the same before and after it was saved."""
    torch.manual_seed(0)
    drafter = TrainableFrozenKVDrafter(make_recipe(kv_source_layers).shape(target.config)).requires_grad_(False)
    for name, tensor in drafter.state_dict().items():
        tensor.normal_(1.0 if "norm" in name or "scalar" in name else 0.0, 0.4)
    return drafter.bfloat16().float()


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def rotate(vector: Tensor, position: int) -> Tensor:
    """Rotates the pairs (i, i + half) of one head's vector as complex numbers."""
    half = len(vector) // 2
    angles = position * 10000.0 ** (-torch.arange(half).double() / half)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones(half).double(), angles)
    return torch.cat([turned.real, turned.imag])


class OneAnchorDrafter:
    """Drafts from one position, written from the definition.

    The target sees the text up to there and nothing else; every step puts single queries to all that is in its cache.
    """

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, committed: Tensor) -> None:
        self.tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.sources = json.loads((folder / "config.json").read_text())["kv_source_layers"]
        output = target.model(committed[None], use_cache=True)
        self.cache = [(layer.keys[0].double(), layer.values[0].double()) for layer in output.past_key_values.layers]
        self.hidden = output.last_hidden_state[0, -1].double()
        self.position = len(committed) - 1
        self.embedding = target.get_input_embeddings().weight.double()

    def step(self, token: int) -> Tensor:
        """The logits `[vocab]` for the token after this one."""
        weights = self.tensors
        stream = weights["pre_projection.weight"] @ torch.cat([self.embedding[token], self.hidden])
        for index, source in enumerate(self.sources):
            layer = {k.split(".", 3)[3]: v for k, v in weights.items() if k.startswith(f"model.layers.{index}.")}
            attended = self.attend(norm(stream, layer["input_layernorm.weight"]), layer, *self.cache[source])
            stream = stream + norm(attended, layer["post_attention_layernorm.weight"])
            inner = norm(stream, layer["pre_feedforward_layernorm.weight"])
            gate = F.gelu(layer["mlp.gate_proj.weight"] @ inner, approximate="tanh")
            outer = layer["mlp.down_proj.weight"] @ (gate * (layer["mlp.up_proj.weight"] @ inner))
            stream = (stream + norm(outer, layer["post_feedforward_layernorm.weight"])) * layer["layer_scalar"]
        state = norm(stream, weights["model.norm.weight"])
        self.hidden = weights["post_projection.weight"] @ state
        return weights["model.embed_tokens.weight"] @ state

    def attend(self, rows: Tensor, layer: dict[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
        outputs = []
        for index, query in enumerate((layer["self_attn.q_proj.weight"] @ rows).split(HEAD_DIM)):
            query = rotate(norm(query, layer["self_attn.q_norm.weight"]), self.position)
            group = index // 2
            outputs.append((keys[group] @ query).softmax(0) @ values[group])
        return layer["self_attn.o_proj.weight"] @ torch.cat(outputs)


def unrolled_logits(
    drafter: TrainableFrozenKVDrafter, target: Qwen3ForCausalLM, text: Tensor, num_steps: int
) -> list[Tensor]:
    """The logits of every step, `[rows, vocab]`."""
    embeddings = target.get_input_embeddings()(text[None, 1:])
    states = drafter.unroll(embeddings, drafter.features(run_target(target, text[None])), num_steps)
    return [drafter.draft_logits(state)[0] for state in states]


def test_unrolled_rows_equal_drafting_step_by_step(tmp_path: Path) -> None:
    target = make_target()
    drafter = random_drafter([3, 1, 1], target)
    save_frozen_kv(drafter, target.config, tmp_path)
    text = torch.randint(VOCAB, (LENGTH,))
    by_step = unrolled_logits(drafter, target, text, 4)
    for anchor in range(LENGTH - 1):
        reference = OneAnchorDrafter(tmp_path, target, text[: anchor + 1])
        for step in range(min(4, LENGTH - 1 - anchor)):
            expected = reference.step(int(text[anchor + 1 + step]))
            torch.testing.assert_close(by_step[step][anchor + step].double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_without_an_anchor_stay_finite() -> None:
    target = make_target()
    for logits in unrolled_logits(random_drafter([3, 1], target), target, torch.arange(5), 4):
        assert logits.shape == (4, VOCAB) and bool(logits.isfinite().all())


def test_matches_are_those_of_drafting_from_every_position(tmp_path: Path) -> None:
    """The evaluation knows the text; a drafter knows its own drafts. Up to the first mismatch that is the same."""
    target = make_target(vocab_size=4)
    save_frozen_kv(random_drafter([2, 3], target), target.config, tmp_path)
    tokens = torch.randint(4, (2, 20))
    matches = make_recipe([2, 3]).matcher(tmp_path, target, CPU)(tokens, 3)
    lengths = []
    for row, text in enumerate(tokens):
        for anchor in range(len(text) - 2):
            reference = OneAnchorDrafter(tmp_path, target, text[: anchor + 1])
            token, agreed = int(text[anchor + 1]), 0
            while agreed < 3 and anchor + 2 + agreed < len(text):
                token = int(reference.step(token).argmax())
                if token != int(text[anchor + 2 + agreed]):
                    break
                agreed += 1
            assert int(matches[row, anchor].int().cumprod(0).sum()) == agreed, (row, anchor)
            lengths.append(agreed)
    assert {0, 1, 2} <= set(lengths), "the case should hold drafts of several lengths"


def assistant_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' class, or a skip; 5.23.0 refuses every config whose layers all share, as an assistant's must."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this transformers has no Gemma 4 assistant")
    if hasattr(transformers.Gemma4TextConfig, "kv_sharing_modes"):
        all_shared = property(lambda config: ["reuse"] * config.num_hidden_layers)
        monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", all_shared)
    return transformers.Gemma4AssistantForCausalLM


def test_checkpoint_loads_in_transformers_and_drafts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has one source of keys and values a layer type, so all layers read the same one here."""
    target = make_target()
    drafter = random_drafter([2, 2], target)
    save_frozen_kv(drafter, target.config, tmp_path)
    assistant, info = assistant_class(monkeypatch).from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    assert not any(info.values()), info
    assert assistant.lm_head.weight is assistant.model.embed_tokens.weight
    text = torch.randint(VOCAB, (LENGTH,))
    by_step = unrolled_logits(drafter, target, text, 3)
    for anchor in range(3, LENGTH - 3):
        output = target.model(text[None, : anchor + 1], use_cache=True)
        source = output.past_key_values.layers[2]
        shared = dict.fromkeys(["full_attention", "sliding_attention"], (source.keys, source.values))
        hidden = output.last_hidden_state[:, -1:]
        for step in range(3):
            embedded = target.get_input_embeddings()(text[None, anchor + 1 + step, None])
            drafted = assistant(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[anchor]]),
                shared_kv_states=shared,
            )
            torch.testing.assert_close(by_step[step][anchor + step], drafted.logits[0, 0], rtol=1e-4, atol=1e-4)
            hidden = drafted.last_hidden_state


def test_checkpoint_has_the_names_and_config_of_an_assistant(tmp_path: Path) -> None:
    target = make_target()
    save_frozen_kv(random_drafter([1, 3], target), target.config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer_shapes = {
        "self_attn.q_proj.weight": (24, 10),
        "self_attn.q_norm.weight": (6,),
        "self_attn.o_proj.weight": (10, 24),
        "mlp.gate_proj.weight": (20, 10),
        "mlp.up_proj.weight": (20, 10),
        "mlp.down_proj.weight": (10, 20),
        "input_layernorm.weight": (10,),
        "post_attention_layernorm.weight": (10,),
        "pre_feedforward_layernorm.weight": (10,),
        "post_feedforward_layernorm.weight": (10,),
        "layer_scalar": (1,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "model.embed_tokens.weight": (30, 10),
        "model.norm.weight": (10,),
        "pre_projection.weight": (10, 24),
        "post_projection.weight": (12, 10),
    } | {f"model.layers.{index}.{name}": shape for index in (0, 1) for name, shape in layer_shapes.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 12,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "kv_source_layers": [1, 3],
    }
    assert expected.items() <= config.items()
    expected_text = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "head_dim": 6, "global_head_dim": 6}
    assert expected_text.items() <= config["text_config"].items()


def test_saved_drafter_loads_again(tmp_path: Path) -> None:
    target = make_target()
    drafter = random_drafter([1, 3], target)
    save_frozen_kv(drafter, target.config, tmp_path)
    loaded = load_frozen_kv(tmp_path)
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_leading_directions_keep_most_of_an_embedding() -> None:
    torch.manual_seed(0)
    embedding = torch.randn(40, 8) @ torch.randn(8, 8)
    directions = leading_directions(embedding, 5)
    torch.testing.assert_close(directions.T @ directions, torch.eye(5), rtol=1e-4, atol=1e-4)
    kept = (embedding @ directions).square().sum()
    torch.testing.assert_close(kept, torch.linalg.svdvals(embedding)[:5].square().sum(), rtol=1e-4, atol=1e-4)
    with refused("drafter.hidden_size=9", "target's 8"):
        leading_directions(embedding, 9)


def test_the_first_weights_lie_on_the_target_s_scales() -> None:
    """At the target's own width the head scores what `post_projection` hands on as the target would."""
    target = make_target()
    target.model.norm.weight.fill_(4.0)
    target.model.layers[2].self_attn.q_norm.weight.copy_(torch.arange(1.0, 1.0 + HEAD_DIM))
    drafter = TrainableFrozenKVDrafter(make_recipe([2, 1], hidden_size=HIDDEN).shape(target.config)).requires_grad_(
        False
    )
    start_from_target(drafter, target)
    state = torch.randn(HIDDEN)
    as_target = target.lm_head(drafter.post_projection(state))
    torch.testing.assert_close(as_target, 4 * drafter.draft_logits(state), rtol=1e-4, atol=1e-4)
    expected = torch.arange(1.0, 1.0 + HEAD_DIM) / HEAD_DIM**0.5
    torch.testing.assert_close(drafter.state_dict()["model.layers.0.self_attn.q_norm.weight"], expected)
    for_embedding, for_hidden = drafter.pre_projection.weight.chunk(2, dim=1)
    embedding_scale = target.get_input_embeddings().weight.square().mean().sqrt()
    assert float(for_embedding.std() * embedding_scale) == pytest.approx((2 * HIDDEN) ** -0.5, rel=0.25)
    assert float(for_hidden.std() * 4.0) == pytest.approx((2 * HIDDEN) ** -0.5, rel=0.25)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"kv_source_layers": [1, 4]}, ("drafter.kv_source_layers=[1, 4]", "0 to 3")),
        ({"kv_source_layers": []}, ("drafter.kv_source_layers=[]",)),
        ({"num_heads": 3}, ("drafter.num_heads=3", "multiple of the target's 2")),
    ],
)
def test_sizes_that_do_not_fit_the_target_are_refused(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with refused(*fragments):
        make_recipe([1])
        make_recipe(**({"kv_source_layers": [1]} | changes)).shape(make_target().config)


def test_training_learns_a_text_by_heart(tmp_path: Path) -> None:
    target = make_target()
    texts = Generations(
        torch.randint(VOCAB, (4, LENGTH), dtype=torch.int16), torch.full((4,), 4), torch.full((4,), LENGTH)
    )
    optimisation = OptimisationConfig(
        num_steps=40, batch_size=4, peak_learning_rate=0.01, num_warmup_steps=4, weight_decay=0.0, log_every=10
    )
    task = TrainingTask(target, texts, [], tmp_path / "checkpoint.pt", 0, CPU)
    curve = make_recipe([1, 3], optimisation=optimisation).train(task, tmp_path / "drafter")
    assert curve[-1].loss < curve[0].loss - 0.3
    assert load_frozen_kv(tmp_path / "drafter").shape.kv_source_layers == (1, 3)
