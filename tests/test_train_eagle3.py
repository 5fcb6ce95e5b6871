"""The head's unrolled forward against drafting one token after another, and the checkpoint it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spec_lab.train.drafter import TrainingTask
from spec_lab.train.drafter_config import Eagle3TrainingConfig
from spec_lab.train.eagle3 import Eagle3Shape, TrainableEagle3Head
from spec_lab.train.eagle3_recipe import Eagle3Recipe, load_head, most_frequent_tokens, save_head
from spec_lab.train.generations import Generations
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.unroll import UnrolledLoss
from tests.one_row import OneRowAttention, feed_forward, norm

SHAPE = Eagle3Shape(
    hidden_size=12, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=30, draft_vocab_size=10
)
DRAFT_TOKEN_IDS = torch.tensor([0, 1, 4, 5, 9, 11, 12, 20, 21, 29])


EAGLE3 = Eagle3Recipe(
    Eagle3TrainingConfig(
        intermediate_size=20,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        draft_vocab_size=3,
        num_unrolled_steps=3,
        step_loss_decay=0.8,
        optimisation=OptimisationConfig(num_steps=2, batch_size=1, peak_learning_rate=0.1, num_warmup_steps=1),
    )
)


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


def test_loss_counts_only_steps_anchored_behind_the_prompt_and_ending_in_the_text(head: TrainableEagle3Head) -> None:
    num_rows, prompt_length, length = 7, 3, 7
    torch.manual_seed(1)
    embeddings = torch.randn(1, num_rows, SHAPE.hidden_size)
    features = torch.randn(1, num_rows, 3 * SHAPE.hidden_size)
    probabilities = torch.rand(1, num_rows, SHAPE.draft_vocab_size)
    row = torch.arange(num_rows)[None]
    head = head.float()
    loss = UnrolledLoss(head, num_steps=2, step_loss_decay=0.5)(
        embeddings, probabilities.log(), row + 2 < length, row - (prompt_length - 1), features
    )
    states = head.unroll(embeddings, (features,), 2)
    by_step = []
    # Drafted are tokens 4, 5 and 6 from anchors 2, 3 and 4; a second step ends in tokens 5 and 6.
    for step, rows in enumerate([[2, 3, 4], [3, 4]]):
        log_q = head.draft_logits(states[step])[0].log_softmax(-1)
        by_step.append(torch.stack([-(probabilities[0, r] * log_q[r]).sum() for r in rows]).mean())
    torch.testing.assert_close(loss, (by_step[0] + 0.5 * by_step[1]) / 1.5)


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


@pytest.mark.parametrize("norms", [False, True])
def test_its_description_names_the_norms_that_it_has(tmp_path: Path, norms: bool) -> None:
    shape = replace(SHAPE, norms_taps=norms, norms_output=norms)
    save_head(random_head(shape, DRAFT_TOKEN_IDS), 2048, tmp_path)
    reading = EAGLE3.describe(tmp_path).reading
    assert ("fc_norm" in reading, "norm_output" in reading) == (norms, norms)


def test_draft_vocabulary_is_what_the_target_writes_and_the_markers() -> None:
    generations = Generations(
        tokens=torch.tensor([[7, 7, 7, 3, 3, 5, 0], [7, 2, 3, 5, 5, 2, 9]], dtype=torch.int16),
        prompt_lengths=torch.tensor([3, 1]),
        lengths=torch.tensor([6, 6]),
    )
    # Written: 3 3 5 and 2 3 5 5 2; the prompts' sevens and the nine behind the end do not count.
    assert most_frequent_tokens(generations, 10, 3, always_drafted=[8]).tolist() == [3, 5, 8]
    with pytest.raises(ValueError, match="draft_vocab_size=11"):
        most_frequent_tokens(generations, 10, 11, [8])


def small_target() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=6,
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize(("is_normed", "words"), [(False, "before the final norm"), (True, "after the final norm")])
def test_a_trained_head_has_the_norms_of_eagle31_if_they_are_chosen(
    is_normed: bool, words: str, tmp_path: Path
) -> None:
    recipe = Eagle3Recipe(replace(EAGLE3.config, norms_taps=is_normed, norms_output=is_normed))
    texts = Generations(torch.tensor([[1, 2, 4, 2, 4, 1, 2]]), torch.tensor([1]), torch.tensor([7]))
    task = TrainingTask(small_target(), texts, [], tmp_path / "checkpoint.pt", 0, torch.device("cpu"))
    recipe.train(task, tmp_path / "head")
    head = load_head(tmp_path / "head")
    assert len(head.fc_norm) == 3 * is_normed and head.shape.norms_output == is_normed
    assert words in " ".join(recipe.describe(tmp_path / "head").reading.split())


def test_matches_are_those_of_drafting_from_every_position(tmp_path: Path) -> None:
    """The evaluation knows the text; a drafter knows its own drafts. Up to the first mismatch that is the same."""
    torch.manual_seed(5)
    model = small_target()
    save_head(random_head(replace(SHAPE, vocab_size=6, draft_vocab_size=3), torch.tensor([1, 2, 4])), 2048, tmp_path)
    tokens = torch.randint(1, 5, (2, 20))
    matches = EAGLE3.matcher(tmp_path, model, torch.device("cpu"))(tokens, 3)

    head = load_head(tmp_path).double()
    embedding = model.get_input_embeddings().weight.double()
    hidden_states = model(tokens, output_hidden_states=True).hidden_states
    lengths = []
    for row, text in enumerate(tokens.tolist()):
        features = torch.cat([hidden_states[layer][row] for layer in (2, 4, 5)], dim=-1).double()
        for anchor in range(len(text) - 2):
            drafter = OneRowDrafter(head)
            for position in range(anchor + 1):
                hidden = drafter.row(embedding[text[position + 1]], head.fc.weight @ features[position], position)
            agreed = 0
            while agreed < 3 and anchor + 2 + agreed < len(text):
                draft = [1, 2, 4][int((head.lm_head.weight @ norm(hidden, head.norm.weight)).argmax())]
                if draft != text[anchor + 2 + agreed]:
                    break
                agreed += 1
                hidden = drafter.row(embedding[draft], hidden, anchor + agreed)
            assert int(matches[row, anchor].int().cumprod(0).sum()) == agreed, (row, anchor)
            lengths.append(agreed)
    assert {0, 1, 2} <= set(lengths), "the case should hold drafts of several lengths"
