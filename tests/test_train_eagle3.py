"""The head's unrolled forward against drafting one token after another, and the checkpoint it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spec_lab.checkpoints.families import read_model_config
from spec_lab.train.heads import Eagle3
from spec_lab.train.heads.eagle3 import Eagle3Module, Eagle3Shape
from spec_lab.train.target import FrozenTarget
from spec_lab.train.unrolled import Places
from tests.one_row import OneRowAttention, feed_forward, norm
from tests.tiny_checkpoints import make_tiny_target
from tests.train_lab import record_run, texts_of

SHAPE = Eagle3Shape(
    hidden_size=12, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=30, draft_vocab_size=10
)
DRAFT_TOKEN_IDS = torch.tensor([0, 1, 4, 5, 9, 11, 12, 20, 21, 29])


def random_head(shape: Eagle3Shape, draft_token_ids: Tensor) -> Eagle3Module:
    torch.manual_seed(0)
    head = Eagle3Module(shape, draft_token_ids)
    for name, parameter in head.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.5)
    return head.requires_grad_(False)


@pytest.fixture
def head() -> Eagle3Module:
    return random_head(SHAPE, DRAFT_TOKEN_IDS).double()


class OneRowDrafter:
    """A drafter written from the definition: one row at a time."""

    def __init__(self, head: Eagle3Module) -> None:
        self.head = head
        self.attention = OneRowAttention(head.midlayer.self_attn)

    def row(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        """Appends a row and returns the hidden state it leaves."""
        layer = self.head.midlayer
        wide = torch.cat([norm(embedding, layer.input_layernorm.weight), norm(hidden, layer.hidden_norm.weight)])
        hidden = hidden + self.attention.row(wide, position)
        return hidden + feed_forward(layer.mlp, norm(hidden, layer.post_attention_layernorm.weight))


@pytest.mark.parametrize(("num_rows", "num_steps"), [(9, 4), (3, 6)], ids=["long", "more steps than rows"])
def test_unrolled_rows_equal_drafting_step_by_step(head: Eagle3Module, num_rows: int, num_steps: int) -> None:
    embeddings = torch.randn(num_rows, SHAPE.hidden_size, dtype=torch.float64)
    features = torch.randn(num_rows, 3 * SHAPE.hidden_size, dtype=torch.float64)
    places = Places(torch.arange(num_rows)[None], torch.ones(1, num_rows))
    states = head.unroll(embeddings[None], (features[None],), num_steps, places)
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


@pytest.mark.parametrize("norms", [False, True])
def test_a_saved_head_loads_again_with_the_norms_of_eagle31_if_they_are_chosen(norms: bool, tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target", "llama")
    texts = texts_of(record_run(tmp_path / "texts", tmp_path / "target"))
    target = FrozenTarget.load(tmp_path / "target", torch.device("cpu"), torch.float32, 48)
    kind = Eagle3(draft_vocab_size=40, norms_taps=norms, norms_output=norms)
    head = kind.build(target, texts, 0).bfloat16().float()
    kind.save(head, target, tmp_path / "head")
    loaded = kind.load(tmp_path / "head", target)
    assert loaded.shape == head.shape and len(loaded.fc_norm) == 3 * norms
    assert head.shape.intermediate_size == read_model_config(tmp_path / "target").layers[-1].intermediate_size
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
