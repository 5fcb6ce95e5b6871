"""The head's unrolled forward against drafting one token after another, and the checkpoint it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spec_lab.train.eagle3 import Eagle3Shape, TrainableEagle3Head
from spec_lab.train.eagle3_recipe import load_head, save_head
from tests.one_row import OneRowAttention, feed_forward, norm

SHAPE = Eagle3Shape(
    hidden_size=12, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=30, draft_vocab_size=10
)
DRAFT_TOKEN_IDS = torch.tensor([0, 1, 4, 5, 9, 11, 12, 20, 21, 29])


def random_head(shape: Eagle3Shape, draft_token_ids: Tensor) -> TrainableEagle3Head:
    torch.manual_seed(0)
    head = TrainableEagle3Head(shape, draft_token_ids)
    for name, parameter in head.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.5)
    return head.requires_grad_(False)


@pytest.fixture
def head() -> TrainableEagle3Head:
    return random_head(SHAPE, DRAFT_TOKEN_IDS).double()


class OneRowDrafter:
    """A drafter written from the definition: one row at a time."""

    def __init__(self, head: TrainableEagle3Head) -> None:
        self.head = head
        self.attention = OneRowAttention(head.midlayer.self_attn)

    def row(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        """Appends a row and returns the hidden state it leaves."""
        layer = self.head.midlayer
        wide = torch.cat([norm(embedding, layer.input_layernorm.weight), norm(hidden, layer.hidden_norm.weight)])
        hidden = hidden + self.attention.row(wide, position)
        return hidden + feed_forward(layer.mlp, norm(hidden, layer.post_attention_layernorm.weight))


@pytest.mark.parametrize(("num_rows", "num_steps"), [(9, 4), (3, 6)], ids=["long", "more steps than rows"])
def test_unrolled_rows_equal_drafting_step_by_step(head: TrainableEagle3Head, num_rows: int, num_steps: int) -> None:
    embeddings = torch.randn(num_rows, SHAPE.hidden_size, dtype=torch.float64)
    features = torch.randn(num_rows, 3 * SHAPE.hidden_size, dtype=torch.float64)
    states = head.unroll(embeddings[None], (features[None],), num_steps)
    assert {state.shape for state in states} == {(1, num_rows, SHAPE.hidden_size)}
    for anchor in range(num_rows):
        drafter = OneRowDrafter(head)
        for position in range(anchor + 1):
            hidden = drafter.row(embeddings[position], head.fc.weight @ features[position], position)
        for step in range(min(num_steps, num_rows - anchor)):
            if step > 0:
                hidden = drafter.row(embeddings[anchor + step], hidden, anchor + step)
            # The unrolling keeps norms and rotations in float32.
            torch.testing.assert_close(states[step][0, anchor + step].double(), hidden, rtol=1e-4, atol=1e-4)


def test_checkpoint_has_the_names_and_config_that_engines_load(head: TrainableEagle3Head, tmp_path: Path) -> None:
    save_head(head, 2048, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "midlayer."
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (12, 36),
        layer + "input_layernorm.weight": (12,),
        layer + "hidden_norm.weight": (12,),
        layer + "post_attention_layernorm.weight": (12,),
        layer + "self_attn.q_proj.weight": (24, 24),
        layer + "self_attn.k_proj.weight": (12, 24),
        layer + "self_attn.v_proj.weight": (12, 24),
        layer + "self_attn.o_proj.weight": (12, 24),
        layer + "mlp.gate_proj.weight": (20, 12),
        layer + "mlp.up_proj.weight": (20, 12),
        layer + "mlp.down_proj.weight": (12, 20),
        "norm.weight": (12,),
        "lm_head.weight": (10, 12),
        "d2t": (10,),
        "t2d": (30,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (torch.arange(10) + tensors["d2t"]).tolist() == DRAFT_TOKEN_IDS.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_TOKEN_IDS.tolist()
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 30,
        "draft_vocab_size": 10,
        "head_dim": 6,
        "rope_theta": 10000.0,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
    }
    assert expected.items() <= config.items()
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids"} & config.keys()


def test_saved_head_loads_again(head: TrainableEagle3Head, tmp_path: Path) -> None:
    head = head.bfloat16().float()
    save_head(head, 2048, tmp_path)
    loaded = load_head(tmp_path)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
