"""`drafter=draft_model`: distils a small, ordinary Qwen3 model on the target's own texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.draft_model import TrainableDraftModel, load_draft_model, save_draft_model
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.drafter_config import DraftModelTrainingConfig, UnrolledTrainingConfig
from spec_lab.train.frozen_target import FrozenTarget, full_plan
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.layers import leading_directions
from spec_lab.train.loop import CurvePoint
from spec_lab.train.packed_rows import TrainingTexts
from spec_lab.train.packed_training import PackedTask, train_packed
from spec_lab.train.unrolled_form import UNROLLED

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


SAMPLED_ROWS = 256
"""The most embedding rows from which the scale of the first logits is estimated."""


@dataclass(frozen=True, slots=True)
class DraftModelRecipe:
    """Trains a draft model on the target's own texts, of which only the tokens that the target wrote count."""

    config: DraftModelTrainingConfig

    @property
    def form(self) -> PackedForm:
        """The functions for packed rows. Training takes one step, whose states serve all further steps."""
        return replace(UNROLLED, train=train_one_step)

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> TrainableDraftModel:
        """Make a draft model for a frozen target; see `HeadRecipe`."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        its, config = target.config, self.config
        vocabulary = torch.arange(its.vocab_size, device=target.device)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=its.vocab_size,
                hidden_size=config.hidden_size,
                **keys_of_layers(config),
                max_position_embeddings=its.max_position_embeddings,
                rope_parameters={"rope_type": "default", "rope_theta": full_plan(its).rope.theta},
            )
        )
        embedding = target.embed(vocabulary).float()
        directions = leading_directions(embedding, config.hidden_size)
        first = embedding @ directions
        model.get_input_embeddings().weight.data.copy_(first)
        # The embedding is also the head. The norm before the head is initialised so that the first logits of a row have
        # a standard deviation of about 1.
        states = rms_normed(first[:: -(-len(first) // SAMPLED_ROWS)])
        model.model.norm.weight.data.fill_(1 / float((states @ first.T).std(-1).mean()))
        return TrainableDraftModel(model)

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return no taps: it reads only tokens."""
        return ()

    def save(self, drafter: TrainableDraftModel, target: FrozenTarget, folder: Path) -> None:
        """Write it as a separate model."""
        save_draft_model(drafter.model, folder)

    def load(self, folder: Path, target: FrozenTarget) -> TrainableDraftModel:
        """Read what `save` wrote, in float32."""
        return TrainableDraftModel(load_draft_model(folder)).to(target.device)

    def describe(self, folder: Path) -> DrafterDescription:
        """Return the card's description; see `DrafterRecipe`."""
        config, sizes = self.config, self.config.sizes
        return DrafterDescription(
            kind="a draft model",
            reading=f"""A Qwen3-architecture language model on its own, with the target's tokenizer and vocabulary:
{config.num_layers} layers, hidden {config.hidden_size}, feed-forward {sizes.intermediate_size}, {sizes.num_heads}
query and {sizes.num_kv_heads} key-value heads of {sizes.head_dim}, tied embeddings. It reads tokens alone, nothing of
the target, and keeps its own cache. `AutoModelForCausalLM` loads it. Its embedding began as the target's in fewer
dimensions.""",
            loss="token by token",
        )


def rms_normed(rows: Tensor) -> Tensor:
    """Scale rows to unit mean square."""
    return rows * rows.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def keys_of_layers(config: DraftModelTrainingConfig) -> dict[str, Any]:
    """Return the keys of config.json for its layers. Its embedding is also its head."""
    return {
        "intermediate_size": config.sizes.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.sizes.num_heads,
        "num_key_value_heads": config.sizes.num_kv_heads,
        "head_dim": config.sizes.head_dim,
        "tie_word_embeddings": True,
    }


def train_one_step(
    drafter: TrainableDraftModel, config: DraftModelTrainingConfig, task: PackedTask
) -> list[CurvePoint]:
    """Train the drafter in place on packed rows. Only the tokens that the target wrote count."""
    one = UnrolledTrainingConfig(config.name, config.optimisation, config.loss, num_unrolled_steps=1)
    return train_packed(drafter, one, task)
