"""`drafter=frozen_kv`: trains queries over the target's keys and values, saved in the Gemma 4 assistant's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spec_lab.errors import UserError
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import FrozenKvTrainingConfig
from spec_lab.train.embedding_init import leading_directions
from spec_lab.train.frozen_kv import RMS_NORM_EPS, FrozenKVLayer, FrozenKVShape, KVSource, TrainableFrozenKVDrafter
from spec_lab.train.loop import CurvePoint
from spec_lab.train.unroll import train_unrolled, unrolled_loss_words, unrolled_matcher

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM

FIRST_BRANCH_SCALE = 0.3


@dataclass(frozen=True, slots=True)
class FrozenKVRecipe:
    """Trains a drafter that has queries only on the target's own texts."""

    config: FrozenKvTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the drafter and save it, as `DrafterRecipe` says."""
        torch.manual_seed(task.seed)
        drafter = TrainableFrozenKVDrafter(self.shape(task.model.config))
        start_from_target(drafter, task.model)
        curve = train_unrolled(drafter, self.config, task)
        save_frozen_kv(drafter, task.model.config, folder)
        return curve

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Put the saved drafter beside its target, as `DrafterRecipe` says. It computes in float32."""
        return unrolled_matcher(load_frozen_kv(folder).to(device).eval(), model)

    def describe(self, folder: Path) -> DrafterDescription:
        """Say for the card what `DrafterRecipe` asks."""
        _, config = load_drafter(folder)
        text = config["text_config"]
        sources = ", ".join(map(str, config["kv_source_layers"]))
        return DrafterDescription(
            kind="a frozen-KV drafter",
            reading=f"""Its architecture and checkpoint are those of the Gemma 4 assistant
(`Gemma4AssistantForCausalLM`): {text["num_hidden_layers"]} layers of width {text["hidden_size"]} and feed-forward
{text["intermediate_size"]} with {text["num_attention_heads"]} query heads and no keys or values of their own. In order
they read those of the target's layers {sources} (`kv_source_layers`, our addition to the config; transformers knows
one source for all). The head is the drafter's own embedding of all {text["vocab_size"]} tokens.

Every step stands at the last committed position. It takes the target's embedding of the last token, unscaled, beside
the target's hidden state after its final norm; later steps take, in place of that, `post_projection` of what the
drafter left.""",
            loss=unrolled_loss_words(self.config),
        )

    def shape(self, target: Qwen3Config) -> FrozenKVShape:
        """Return the sizes that the drafter has beside this target.

        Raises UserError where `kv_source_layers` names none of its layers, or the heads do not fit.
        """
        num_layers = target.num_hidden_layers
        if not self.config.kv_source_layers or not all(
            0 <= layer < num_layers for layer in self.config.kv_source_layers
        ):
            raise UserError(
                f"drafter.kv_source_layers={self.config.kv_source_layers} must name layers of the target, "
                f"0 to {num_layers - 1}"
            )
        if self.config.num_heads % target.num_key_value_heads:
            raise UserError(
                f"drafter.num_heads={self.config.num_heads} must be a multiple of the target's "
                f"{target.num_key_value_heads} key-value heads"
            )
        return FrozenKVShape(
            backbone_hidden_size=target.hidden_size,
            hidden_size=self.config.hidden_size,
            intermediate_size=self.config.intermediate_size,
            num_heads=self.config.num_heads,
            vocab_size=target.vocab_size,
            sources=tuple(
                KVSource(layer, target.num_key_value_heads, target.head_dim, target.rope_parameters["rope_theta"])
                for layer in self.config.kv_source_layers
            ),
        )


@torch.no_grad()
def start_from_target(drafter: TrainableFrozenKVDrafter, model: Qwen3ForCausalLM) -> None:
    """Set first weights on the scales of what the drafter reads and leaves; what is not named here stays random.

    The vocabulary and `post_projection` lie in the directions in which the target's embedding is largest. Embedding and
    hidden state enter with the same weight, though the one is much smaller. Queries are as long as those that the
    target puts to the same keys. Branches start small beside the stream, as in LayerScale (Touvron et al., 2021).
    """
    embedding, final_norm = model.get_input_embeddings().weight.cpu(), model.model.norm.weight.cpu()
    directions = leading_directions(embedding, drafter.shape.hidden_size)
    drafter.model.embed_tokens.weight.copy_(embedding @ directions)
    hidden_scale = final_norm.square().mean().sqrt()
    drafter.post_projection.weight.copy_(directions * hidden_scale)
    nn.init.normal_(drafter.pre_projection.weight, std=drafter.pre_projection.in_features**-0.5)
    for_embedding, for_hidden = drafter.pre_projection.weight.chunk(2, dim=1)
    for_embedding /= embedding.square().mean().sqrt()
    for_hidden /= hidden_scale
    for layer, source in zip(drafter.model.layers, drafter.shape.sources, strict=True):
        assert isinstance(layer, FrozenKVLayer)
        target_norm = model.model.layers[source.layer].self_attn.q_norm.weight.cpu()
        layer.self_attn.q_norm.weight.copy_(target_norm * source.head_dim**-0.5)
        layer.post_attention_layernorm.weight.fill_(FIRST_BRANCH_SCALE)
        layer.post_feedforward_layernorm.weight.fill_(FIRST_BRANCH_SCALE)


def save_frozen_kv(drafter: TrainableFrozenKVDrafter, target: Qwen3Config, folder: Path) -> None:
    """Save `config.json` and `model.safetensors` as transformers writes a `Gemma4AssistantForCausalLM`, in bf16."""
    save_drafter(drafter.state_dict(), assistant_config(drafter.shape, target), folder)


def assistant_config(shape: FrozenKVShape, target: Qwen3Config) -> dict[str, Any]:
    """Return config.json: what differs from transformers' defaults, and our `kv_source_layers`."""
    num_layers, source = len(shape.sources), shape.sources[0]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": shape.backbone_hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "kv_source_layers": list(shape.kv_source_layers),
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_kv_shared_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": source.num_kv_heads,
            "head_dim": source.head_dim,
            "global_head_dim": source.head_dim,
            "attention_k_eq_v": False,
            "layer_types": ["full_attention"] * num_layers,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": source.rope_theta}},
            "rms_norm_eps": RMS_NORM_EPS,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "tie_word_embeddings": True,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "pad_token_id": target.pad_token_id,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "dtype": "bfloat16",
        },
    }


def load_frozen_kv(folder: Path) -> TrainableFrozenKVDrafter:
    """Load the saved drafter, its weights held in float32."""
    tensors, config = load_drafter(folder)
    text = config["text_config"]
    shape = FrozenKVShape(
        backbone_hidden_size=config["backbone_hidden_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        vocab_size=text["vocab_size"],
        sources=tuple(
            KVSource(
                layer,
                text["num_key_value_heads"],
                text["head_dim"],
                text["rope_parameters"]["full_attention"]["rope_theta"],
            )
            for layer in config["kv_source_layers"]
        ),
    )
    drafter = TrainableFrozenKVDrafter(shape)
    drafter.load_state_dict(tensors)
    return drafter
