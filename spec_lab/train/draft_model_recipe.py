"""`drafter=draft_model`: distils a small, ordinary Qwen3 model on the target's own texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.draft_model import TrainableDraftModel, load_draft_model, save_draft_model
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import DraftModelTrainingConfig, UnrolledTrainingConfig
from spec_lab.train.frozen_target import FrozenTarget, full_plan
from spec_lab.train.generations import Generations
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.layers import leading_directions
from spec_lab.train.loop import CurvePoint, train
from spec_lab.train.losses import LOSSES, RowLoss
from spec_lab.train.packed_rows import TrainingTexts
from spec_lab.train.packed_training import PackedTask, train_packed
from spec_lab.train.target import run_target
from spec_lab.train.unroll import agreement
from spec_lab.train.unrolled_form import UNROLLED

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM


SAMPLED_ROWS = 256
"""The most embedding rows from which the scale of the first logits is estimated."""


@dataclass(frozen=True, slots=True)
class DraftModelRecipe:
    """Trains a draft model on the target's own texts. The target's tokens have weight 1, and a prompt's tokens
    `prompt_loss_weight`."""

    config: DraftModelTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the drafter and save it, as `DrafterRecipe` says."""
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(task.seed)
        draft_model = Qwen3ForCausalLM(self.model_config(task.model.config))
        embedding = task.model.get_input_embeddings().weight
        directions = leading_directions(embedding, self.config.hidden_size)
        draft_model.get_input_embeddings().weight.data = embedding @ directions
        generations = task.generations.to(task.device)

        def batch_of(step: int) -> tuple[Tensor, ...]:
            return generations.batch(step, self.config.optimisation.batch_size, task.seed).tensors()

        def inputs_of(*picked: Tensor) -> tuple[Tensor, ...]:
            return distillation_batch(task.model, Generations(*picked), self.config.prompt_loss_weight)

        loss = DistillationLoss(draft_model, LOSSES[self.config.loss])
        curve = train(loss, batch_of, self.config.optimisation, task.checkpoint, task.device, inputs_of)
        draft_model.generation_config = task.model.generation_config
        draft_model.to(torch.bfloat16).save_pretrained(folder)
        return curve

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

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Load the saved drafter for its target, in float32; see `DrafterRecipe`."""
        from transformers import Qwen3ForCausalLM

        draft_model = (
            Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).to(device).eval()
        )

        def match(tokens: Tensor, num_draft_tokens: int) -> Tensor:
            drafts = run_target(draft_model, tokens).logits.argmax(-1)
            # A draft depends only on the tokens before it, not on where its round began.
            return agreement(tokens, [drafts[:, 1:]] * num_draft_tokens)

        return match

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
            loss=f"token by token; a prompt's tokens count {config.prompt_loss_weight:g}",
        )

    def model_config(self, target: Qwen3Config) -> Qwen3Config:
        """Return the target's vocabulary, positions and rotary embedding in this recipe's sizes."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=target.vocab_size,
            hidden_size=self.config.hidden_size,
            **keys_of_layers(self.config),
            max_position_embeddings=target.max_position_embeddings,
            rope_parameters=dict(target.rope_parameters),
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            pad_token_id=target.pad_token_id,
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


@torch.no_grad()
def distillation_batch(
    model: Qwen3ForCausalLM, picked: Generations, prompt_loss_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens `[batch, length]`, the target's next-token log-probabilities `[batch, length - 1, vocab]`, and
    weights `[batch, length - 1]`. The last two leave out the last position.

    The last prompt position has full weight, since it predicts the target's first token. Positions at the end of a text
    or after it have weight 0.
    """
    tokens = picked.tokens.long()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type == "cuda"):
        logits = run_target(model, tokens).logits
    position = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    is_written = position >= picked.prompt_lengths[:, None] - 1
    weights = torch.where(is_written, 1.0, prompt_loss_weight) * (position + 1 < picked.lengths[:, None])
    return tokens, logits[:, :-1].float().log_softmax(-1), weights


class DistillationLoss(nn.Module):
    """The loss between the target's next-token distribution and the draft model's, a weighted mean."""

    def __init__(self, draft_model: Qwen3ForCausalLM, row_loss: RowLoss) -> None:
        super().__init__()
        self.draft_model, self._row_loss = draft_model, row_loss

    def forward(self, tokens: Tensor, log_p: Tensor, weights: Tensor) -> Tensor:
        """Compute the loss of a batch that `distillation_batch` made."""
        # There is no mask, as in the target's training.
        output = self.draft_model(input_ids=tokens, attention_mask={"full_attention": None}, use_cache=False)
        losses = self._row_loss(output.logits[:, :-1], log_p)
        return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
