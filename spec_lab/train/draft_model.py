"""A separate small language model as a drafter on packed rows.

A draft depends only on the tokens before it, not on where its round began. So the states of one forward serve all draft
steps, and training needs only one step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.packed_attention import visible_rows
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.unroll import UnrolledDrafter

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

TIED = "lm_head.weight"


class TrainableDraftModel(UnrolledDrafter):
    """A model of transformers whose embedding is also its head."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def features(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the tokens [batch, rows, 1]. The drafter reads no states of the target."""
        return (outputs.tokens[:, :-1, None],)

    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Return the same states [batch, rows, hidden] for every step. Row p has the state after token p+1.

        The last row is zero, since no token of the text follows token p+1 there.
        """
        tokens, places = features[0][..., 0].long(), rows or RowPlaces.of_one_document(embeddings)
        visible = None if places.segments is None else visible_rows(places.segments)
        output = self.model.model(
            input_ids=tokens,
            position_ids=places.positions.long(),
            attention_mask={"full_attention": visible},
            use_cache=False,
        )
        return [F.pad(output.last_hidden_state[:, 1:], (0, 0, 0, 1))] * num_steps

    def draft_logits(self, state: Tensor) -> Tensor:
        """Return logits [..., vocab]."""
        return self.model.lm_head(state)

    def draft_token_ids(self) -> Tensor:
        """Return the whole vocabulary."""
        weight = self.model.lm_head.weight
        return torch.arange(len(weight), device=weight.device)


def save_draft_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a model in bf16 in transformers' layout."""
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [type(model).__name__]}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != TIED}
    save_drafter(tensors, {**config, "dtype": "bfloat16"}, folder)


def load_draft_model(folder: Path) -> Qwen3ForCausalLM:
    """Load a model that `save_draft_model` wrote, with weights in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tensors, config = load_drafter(folder)
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(Qwen3Config(**{**config, "dtype": "float32"}))
    model.load_state_dict({**tensors, TIED: tensors["model.embed_tokens.weight"]})
    return model
