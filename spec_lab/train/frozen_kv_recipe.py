"""`drafter=frozen_kv`: trains queries over the target's keys and values, and saves them as a Gemma 4 assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.gemma4_assistant_config import AssistantTarget
from spec_lab.checkpoints.taps import Tap
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.drafter_config import FrozenKvTrainingConfig
from spec_lab.train.frozen_kv import FrozenKVLayer, FrozenKVShape, KVSource, TrainableFrozenKVDrafter
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.layers import leading_directions
from spec_lab.train.packed_rows import TrainingTexts
from spec_lab.train.unroll import unrolled_loss_words
from spec_lab.train.unrolled_form import UNROLLED

if TYPE_CHECKING:
    pass

FIRST_BRANCH_SCALE = 0.3


@dataclass(frozen=True, slots=True)
class FrozenKVRecipe:
    """Trains a frozen-KV drafter on the target's own texts."""

    config: FrozenKvTrainingConfig

    @property
    def form(self) -> PackedForm:
        """The functions that train and measure it on packed rows."""
        return UNROLLED

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> TrainableFrozenKVDrafter:
        """Make a drafter for a frozen target; see `HeadRecipe`."""
        torch.manual_seed(seed)
        its, config = target.config, self.config
        shape = FrozenKVShape(
            backbone_hidden_size=its.hidden_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            vocab_size=its.vocab_size,
            sources=tuple(KVSource.of_plan(layer, its.layers[layer]) for layer in config.kv_source_layers),
            rms_norm_eps=its.rms_norm_eps,
            embedding_scale=embedding_scale(target),
        )
        drafter = TrainableFrozenKVDrafter(shape)
        embedding = target.embed(torch.arange(its.vocab_size, device=target.device)).float().cpu()
        norms = [torch.ones(source.head_dim) for source in shape.sources]
        start_from(drafter, embedding, target.final_norm_weight.float().cpu(), norms)
        return drafter

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return no taps: it reads keys, values and the last hidden state."""
        return ()

    def save(self, drafter: TrainableFrozenKVDrafter, target: FrozenTarget, folder: Path) -> None:
        """Write it as a Gemma 4 assistant."""
        keys = assistant_config(drafter.shape, {"max_position_embeddings": target.config.max_position_embeddings})
        save_drafter(drafter.state_dict(), keys, folder)

    def load(self, folder: Path, target: FrozenTarget) -> TrainableFrozenKVDrafter:
        """Read what `save` wrote, its weights held in float32."""
        return load_frozen_kv(folder, embedding_scale(target)).to(target.device)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
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

Every step stands at the last committed position. It takes the target's embedding of the last token, scaled as
the target scales it, beside
the target's hidden state after its final norm. In place of this state, later steps take `post_projection` of the
drafter's last output.""",
            loss=unrolled_loss_words(self.config),
        )


@torch.no_grad()
def start_from(
    drafter: TrainableFrozenKVDrafter, embedding: Tensor, final_norm: Tensor, query_norms: Sequence[Tensor]
) -> None:
    """Initialise weights at the scales of the drafter's inputs and outputs; those not mentioned here are not changed.

    The drafter's embedding and `post_projection` use the directions in which the target's embedding is largest.
    `pre_projection` divides the token's embedding and the hidden state by their root mean squares, so that both count
    equally. Query norms are divided by the root of `head_dim`, since the assistant does not divide its scores. Branches
    start small relative to the stream, as in LayerScale (Touvron et al., 2021).

    Args:
        embedding: [vocab, hidden] of the target.
        final_norm: [hidden] its last norm.
        query_norms: for each source the first weight of the query norm [head_dim].
    """
    directions = leading_directions(embedding, drafter.shape.hidden_size)
    drafter.model.embed_tokens.weight.copy_(embedding @ directions)
    hidden_scale = final_norm.square().mean().sqrt()
    drafter.post_projection.weight.copy_(directions * hidden_scale)
    nn.init.normal_(drafter.pre_projection.weight, std=drafter.pre_projection.in_features**-0.5)
    for_embedding, for_hidden = drafter.pre_projection.weight.chunk(2, dim=1)
    for_embedding /= embedding.square().mean().sqrt() * drafter.shape.embedding_scale
    for_hidden /= hidden_scale
    for layer, source, target_norm in zip(drafter.model.layers, drafter.shape.sources, query_norms, strict=True):
        assert isinstance(layer, FrozenKVLayer)
        layer.self_attn.q_norm.weight.copy_(target_norm * source.head_dim**-0.5)
        layer.post_attention_layernorm.weight.fill_(FIRST_BRANCH_SCALE)
        layer.post_feedforward_layernorm.weight.fill_(FIRST_BRANCH_SCALE)


def embedding_scale(target: FrozenTarget) -> float:
    """Return the factor of the target's embeddings, which its assistants use too."""
    return AssistantTarget.from_model_config(target.config).embedding_scale


def assistant_config(shape: FrozenKVShape, of_target: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json, with our `kv_source_layers` and some keys of the target, `of_target`.

    Keys that are left out here have the right defaults in transformers.
    """
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
            "rope_parameters": {"full_attention": rope_of(source)},
            "rms_norm_eps": shape.rms_norm_eps,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": True,
            **of_target,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "dtype": "bfloat16",
        },
    }


def rope_of(source: KVSource) -> dict[str, Any]:
    """Return the config keys for the RoPE of a layer."""
    if source.turning_pairs == 1.0:
        return {"rope_type": "default", "rope_theta": source.rope_theta}
    return {
        "rope_type": "proportional",
        "rope_theta": source.rope_theta,
        "partial_rotary_factor": source.turning_pairs,
    }


def load_frozen_kv(folder: Path, embedding_scale: float = 1.0) -> TrainableFrozenKVDrafter:
    """Load the saved drafter, its weights held in float32."""
    tensors, config = load_drafter(folder)
    text = config["text_config"]
    rope = text["rope_parameters"]["full_attention"]
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
                rope["rope_theta"],
                rope.get("partial_rotary_factor", 1.0),
            )
            for layer in config["kv_source_layers"]
        ),
        rms_norm_eps=text["rms_norm_eps"],
        embedding_scale=embedding_scale,
    )
    drafter = TrainableFrozenKVDrafter(shape)
    drafter.load_state_dict(tensors)
    return drafter
