"""Reads a Gemma 4 assistant (`Gemma4AssistantForCausalLM`): its config.json, and its tensors under the names there.

Its decoder is read as a target's is. Each layer reads the keys and values of a target layer. A top-level key of our
own, `kv_source_layers`, names these target layers. Without the key, a layer reads the target's last layer of the same
type that owns its KV, as in SGLang (#24436) and vLLM (#41745).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.checkpoint import read_tensors, read_wanted, stored_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.json_input import read_json, refuse_other_target, refuse_values
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.tensor_shapes import Shapes, below, layer_tensor_shapes, weights
from spec_lab.core.errors import UserError

TOKEN_ORDERING = "masked_embedding.token_ordering"
# The only values that the forward code here supports; a missing key is accepted too.
PLAIN_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("gemma4_assistant",),
    "tie_word_embeddings": (True,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
    "hidden_size_per_layer_input": (0,),
}


@dataclass(frozen=True, slots=True)
class CentroidHeadConfig:
    """A head that scores few tokens. The vocabulary is divided into `num_centroids` equal clusters, and only the tokens
    of the `top_k` likeliest clusters are scored."""

    num_centroids: int
    top_k: int


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """A Gemma 4 assistant and the target it belongs to.

    Attributes:
        body: the assistant as a decoder. The `kv_owner` of its layers is the target layer whose KV they read.
        centroids: None if the head is dense.
    """

    target: ModelConfig
    body: ModelConfig
    centroids: CentroidHeadConfig | None

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """The target layer that each layer reads."""
        return tuple(plan.kv_owner for plan in self.body.layers if plan.kv_owner is not None)

    def reading(self, sources: Sequence[int]) -> AssistantConfig:
        """Return the same assistant over other layers of the target."""
        layers = zip(self.body.layers, sources, strict=True)
        body = replace(self.body, layers=tuple(replace(plan, kv_owner=source) for plan, source in layers))
        return replace(self, body=body)


def owns_kv(plan: LayerPlan) -> bool:
    """Return whether a layer of a target writes keys and values of its own."""
    return plan.kv_owner is None and plan.delta_net is None


def form_of_kv(plan: LayerPlan) -> tuple[bool, int, int, RopeConfig]:
    """Return what the keys and values of layers must have in common to be read by the same queries."""
    return plan.window is not None, plan.num_kv_heads, plan.head_dim, plan.rope


def read_assistant_config(folder: Path, target: ModelConfig) -> AssistantConfig:
    """Read an assistant's config.json and check that it belongs to the target.

    Raises:
        UserError: an option that is not supported, or an assistant for another target.
    """
    source, keys = str(folder / "config.json"), read_json(folder / "config.json")
    refuse_values(source, {**keys["text_config"], "model_type": None, **keys}, PLAIN_OPTIONS)
    body = read_decoder(keys, source)
    assert body.gemma4 is not None
    refuse_other_target(source, target, hidden_size=keys["backbone_hidden_size"], vocab_size=body.vocab_size)
    sources = _kv_sources(keys, body, target, source)
    for index, (plan, kv_source) in enumerate(zip(body.layers, sources, strict=True)):
        form = {name: getattr(plan, name) for name in ("num_kv_heads", "head_dim", "rope")}
        refuse_other_target(f"{source}, layer {index}", target.layers[kv_source], **form)
    centroids = CentroidHeadConfig(keys.get("num_centroids", 2048), keys.get("centroid_intermediate_top_k", 32))
    body = replace(body, gemma4=replace(body.gemma4, per_layer_width=0))
    return AssistantConfig(target, body, centroids if keys.get("use_ordered_embeddings") else None).reading(sources)


def _kv_sources(keys: Mapping[str, Any], body: ModelConfig, target: ModelConfig, source: str) -> Sequence[int]:
    """Return the target layer that each layer reads: the one in `kv_source_layers`, else the last of its type that owns
    its KV."""
    owners = [index for index, plan in enumerate(target.layers) if owns_kv(plan)]
    if (named := keys.get("kv_source_layers")) is not None:
        for layer in named:
            refuse_values(source, {"kv_source_layers": layer}, {"kv_source_layers": owners})
        return tuple(named)
    last = {target.layers[index].window is not None: index for index in owners}
    sliding = [plan.window is not None for plan in body.layers]
    for is_sliding in sliding:
        refuse_values(source, {"a sliding layer": is_sliding}, {"a sliding layer": last})
    return [last[is_sliding] for is_sliding in sliding]


def load_assistant(
    folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[AssistantConfig, dict[str, torch.Tensor]]:
    """Read an assistant: its config, and its tensors under the checkpoint's names, cast to `dtype`.

    If the vocabulary has clusters, `masked_embedding.token_ordering` is [vocab_size] int64, the token ids cluster by
    cluster.

    Raises:
        UserError: the errors of `read_assistant_config`; tensors missing, of another shape, not expected or in an
            unsupported quantization; a token_ordering that does not name every token once.
    """
    config = read_assistant_config(folder, target)
    stored = stored_tensors(folder)
    ordering = {name: stored.pop(name) for name in (TOKEN_ORDERING,) if name in stored}
    tensors = read_wanted(stored, assistant_tensor_shapes(config), dtype, device, str(folder))
    if config.centroids is not None:
        # An id out of range would be fed to the target's embedding.
        found, number = read_tensors(ordering, dtype, device).get(TOKEN_ORDERING), target.vocab_size
        if found is None or not torch.equal(found.sort().values.cpu(), torch.arange(number)):
            raise UserError(f"{folder}: {TOKEN_ORDERING} does not name each of {number} tokens once; fetch it again")
        tensors[TOKEN_ORDERING] = found.long()
    return config, tensors


def assistant_tensor_shapes(config: AssistantConfig) -> Shapes:
    """Return the names and shapes of an assistant's weights, without the token ordering. The embedding is the head."""
    hidden, target_hidden = config.body.hidden_size, config.target.hidden_size
    modules: Shapes = {
        "model.embed_tokens": (config.target.vocab_size, hidden),
        "model.norm": (hidden,),
        "pre_projection": (hidden, 2 * target_hidden),
        "post_projection": (target_hidden, hidden),
    }
    shapes = weights(modules)
    for index, plan in enumerate(config.body.layers):
        shapes |= below(f"model.layers.{index}", layer_tensor_shapes(plan, hidden, gemma4=config.body.gemma4))
    if config.centroids is not None:
        shapes |= weights({"masked_embedding.centroids": (config.centroids.num_centroids, hidden)})
    return shapes
