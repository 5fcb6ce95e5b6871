"""The tensors of a Gemma 4 assistant, under the names of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from spec_lab.checkpoints.checkpoint import read_tensors, read_wanted, stored_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig, read_assistant_config
from spec_lab.checkpoints.gemma4_shapes import gemma4_layer_shapes
from spec_lab.core.errors import UserError

TOKEN_ORDERING = "masked_embedding.token_ordering"


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


def assistant_tensor_shapes(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of an assistant's weights, without the token ordering. The embedding is the head."""
    hidden, target_hidden, sizes = config.body.hidden_size, config.target.hidden_size, config.body.gemma4
    assert sizes is not None
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.target.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * target_hidden),
        "post_projection.weight": (target_hidden, hidden),
    }
    for index, plan in enumerate(config.body.layers):
        layer = gemma4_layer_shapes(plan, sizes, hidden)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.centroids is not None:
        shapes["masked_embedding.centroids.weight"] = (config.centroids.num_centroids, hidden)
    return shapes
