"""`drafter=draft_model`: a small Qwen3 model with the target's vocabulary, distilled on the target's own texts.

A draft depends only on the tokens before it, not on where its round began. So the states of one forward serve all draft
steps, and training needs only one step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.export.folders import load_drafter, save_drafter
from spec_lab.train.data import Texts
from spec_lab.train.layers import leading_directions
from spec_lab.train.packed import visible_rows
from spec_lab.train.target import FrozenTarget, TargetOutputs
from spec_lab.train.unrolled import Places, Unrolled, UnrolledModule

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

TIED = "lm_head.weight"
SAMPLED_ROWS = 256
"""The most embedding rows from which the scale of the first logits is estimated."""


class DraftModelModule(UnrolledModule):
    """A model of transformers whose embedding is also its LM head."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def features(self, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        """Return the tokens [batch, rows, 1]. It reads no states of the target."""
        return (outputs.tokens[..., None],)

    def unroll(self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, places: Places) -> list[Tensor]:
        """Return the same states [batch, rows, hidden] for every step. Row p has the state after token p+1; the last
        row is zero, since no token of the text follows there."""
        output = self.model.model(
            input_ids=features[0][..., 0].long(),
            position_ids=places.positions.long(),
            attention_mask={"full_attention": visible_rows(places.segments)},
            use_cache=False,
        )
        return [F.pad(output.last_hidden_state[:, 1:], (0, 0, 0, 1))] * num_steps

    def draft_logits(self, state: Tensor) -> Tensor:
        return self.model.lm_head(state)

    def draft_token_ids(self) -> Tensor:
        weight = self.model.lm_head.weight
        return torch.arange(len(weight), device=weight.device)


@dataclass
class DraftModel(Unrolled):
    """The knobs of a draft model."""

    name: str = "draft_model"
    num_unrolled_steps: int = 1
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return none: it reads only tokens."""
        return ()

    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> DraftModelModule:
        """Make a model whose embedding begins as the target's in fewer dimensions.

        The embedding is also the LM head. The norm before it begins so that the first logits of a row have a standard
        deviation of about 1.
        """
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        its = target.config
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=its.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_hidden_layers=self.num_layers,
                num_attention_heads=self.num_heads,
                num_key_value_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                tie_word_embeddings=True,
                max_position_embeddings=its.max_position_embeddings,
                rope_parameters={"rope_type": "default", "rope_theta": target.plan.rope.theta},
            )
        )
        embedding = target.embed(torch.arange(its.vocab_size, device=target.device)).float()
        first = embedding @ leading_directions(embedding, self.hidden_size)
        model.get_input_embeddings().weight.data.copy_(first)
        states = first[:: -(-len(first) // SAMPLED_ROWS)]
        states = states * states.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
        model.model.norm.weight.data.fill_(1 / float((states @ first.T).std(-1).mean()))
        return DraftModelModule(model)

    def save(self, module: DraftModelModule, target: FrozenTarget, folder: Path) -> None:
        """Write it as a separate model, in transformers' layout."""
        model = module.model
        config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [type(model).__name__]}
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name != TIED}
        save_drafter(tensors, {**config, "dtype": "bfloat16"}, folder)

    def load(self, folder: Path, target: FrozenTarget) -> DraftModelModule:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        tensors, config = load_drafter(folder)
        model = Qwen3ForCausalLM(Qwen3Config(**{**config, "dtype": "float32"}))
        model.load_state_dict({**tensors, TIED: tensors["model.embed_tokens.weight"]})
        return DraftModelModule(model).to(target.device)

    def describe(self) -> str:
        return (
            f"A Qwen3 language model of {self.num_layers} layers, with the target's tokenizer and vocabulary. It reads "
            "tokens alone, and its embedding began as the target's in fewer dimensions."
        )
