"""`drafter=assistant`: a Gemma 4 assistant for a Gemma 4 target.

Of the target's layers that own their KV, it reads the last one with a window and the last one with full attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import AssistantTrainingConfig
from spec_lab.train.frozen_kv import FrozenKVLayer, FrozenKVShape, KVSource, TrainableFrozenKVDrafter
from spec_lab.train.frozen_kv_recipe import FIRST_BRANCH_SCALE
from spec_lab.train.layers import leading_directions
from spec_lab.train.loop import CurvePoint
from spec_lab.train.target import sizes_of
from spec_lab.train.unroll import train_unrolled, unrolled_loss_words, unrolled_matcher

SHARED_KEYS = (
    "num_key_value_heads",
    "attention_k_eq_v",
    "sliding_window",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_activation",
    "vocab_size",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""The keys of the assistant's `text_config` that are copied from its target."""


@dataclass(frozen=True, slots=True)
class AssistantRecipe:
    """Trains queries over the target's keys and values: sliding-window layers first, then one with full attention."""

    config: AssistantTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the assistant and save it, as `DrafterRecipe` says."""
        torch.manual_seed(task.seed)
        keys = assistant_keys(self.config, task.model)
        drafter = TrainableFrozenKVDrafter(assistant_shape(sizes_of(task.model), keys["text_config"]))
        start_from_gemma(drafter, task.model)
        curve = train_unrolled(drafter, self.config, task)
        save_drafter(drafter.state_dict(), keys, folder)
        return curve

    def matcher(self, folder: Path, model: Any, device: torch.device) -> DraftMatcher:
        """Load the saved assistant next to its target, in float32; see `DrafterRecipe`."""
        return unrolled_matcher(load_assistant(folder, model).to(device).eval(), model)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        _, config = load_drafter(folder)
        text = config["text_config"]
        return DrafterDescription(
            kind="a Gemma 4 assistant",
            reading=f"""Its architecture and checkpoint are those of the Gemma 4 assistant
(`Gemma4AssistantForCausalLM`): {text["num_hidden_layers"]} layers of width {text["hidden_size"]} and feed-forward
{text["intermediate_size"]} with {text["num_attention_heads"]} query heads and no keys or values of their own. Its
sliding-window layers and its full-attention layer read the keys and values of the target's last layer of the same kind
that has its own. The head is the assistant's own embedding of all
{text["vocab_size"]} tokens.

Every step stands at the last committed position. It takes the target's embedding of the last token, scaled as the
target scales it, beside the target's hidden state after its final norm. In place of this state, later steps take
`post_projection` of the assistant's last output.""",
            loss=unrolled_loss_words(self.config),
        )


def assistant_keys(config: AssistantTrainingConfig, model: Any) -> dict[str, Any]:
    """Return an assistant's config.json. Keys that are left out here have the right defaults in transformers."""
    target, sizes, num_layers = model.config.to_dict(), sizes_of(model), config.num_sliding_layers + 1
    sliding, full = (sizes.layers[layer] for layer in last_owners(sizes))
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_kv_shared_layers": num_layers,
            "num_attention_heads": config.num_heads,
            "head_dim": sliding.head_dim,
            "global_head_dim": full.head_dim,
            "layer_types": ["sliding_attention"] * config.num_sliding_layers + ["full_attention"],
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "dtype": "bfloat16",
            **{key: target[key] for key in SHARED_KEYS},
        },
    }


def assistant_shape(target: ModelConfig, text: dict[str, Any]) -> FrozenKVShape:
    """Return the sizes in the `text_config` of an assistant for this target."""
    sliding, full = last_owners(target)
    layers = (sliding if kind == "sliding_attention" else full for kind in text["layer_types"])
    return FrozenKVShape(
        backbone_hidden_size=target.hidden_size,
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        vocab_size=target.vocab_size,
        sources=tuple(KVSource.of_plan(layer, target.layers[layer]) for layer in layers),
        rms_norm_eps=text["rms_norm_eps"],
    )


def load_assistant(folder: Path, target: Any) -> TrainableFrozenKVDrafter:
    """Load the saved assistant for its target, with weights in float32."""
    tensors, config = load_drafter(folder)
    drafter = TrainableFrozenKVDrafter(assistant_shape(sizes_of(target), config["text_config"]))
    drafter.load_state_dict(tensors)
    return drafter


def last_owners(target: ModelConfig) -> tuple[int, int]:
    """Return the last layer with a window, and the last without, that own their keys and values."""
    owners = {plan.window is None: index for index, plan in enumerate(target.layers) if plan.kv_owner is None}
    return owners[False], owners[True]


@torch.no_grad()
def start_from_gemma(drafter: TrainableFrozenKVDrafter, target: Any) -> None:
    """Initialise weights at the scales of the assistant's inputs and outputs, like `start_from_target` for Qwen3.

    Gemma scales its embeddings, so the weights for them are divided by that scale too. Query norms are copied as they
    are, since neither model divides its scores by the root of `head_dim`.
    """
    embedding, final_norm = target.model.embed_tokens.weight.cpu(), target.model.norm.weight.cpu()
    directions = leading_directions(embedding, drafter.shape.hidden_size)
    hidden_scale = final_norm.square().mean().sqrt()
    scale = target.model.embed_tokens.embed_scale.item()
    drafter.model.embed_tokens.weight.copy_(embedding @ directions)
    drafter.post_projection.weight.copy_(directions * hidden_scale)
    nn.init.normal_(drafter.pre_projection.weight, std=drafter.pre_projection.in_features**-0.5)
    for_embedding, for_hidden = drafter.pre_projection.weight.chunk(2, dim=1)
    for_embedding /= scale * embedding.square().mean().sqrt()
    for_hidden /= hidden_scale
    for layer, source in zip(drafter.model.layers, drafter.shape.sources, strict=True):
        assert isinstance(layer, FrozenKVLayer)
        layer.self_attn.q_norm.weight.copy_(target.model.layers[source.layer].self_attn.q_norm.weight.cpu())
        layer.post_attention_layernorm.weight.fill_(FIRST_BRANCH_SCALE)
        layer.post_feedforward_layernorm.weight.fill_(FIRST_BRANCH_SCALE)
