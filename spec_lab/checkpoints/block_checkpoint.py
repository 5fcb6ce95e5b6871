"""The tensors of block drafters, under the names of z-lab's checkpoints for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from spec_lab.checkpoints.block_config import BlockConfig, HeadSizes
from spec_lab.checkpoints.block_layouts import read_block_config
from spec_lab.checkpoints.checkpoint import Names, read_wanted, renamed, stored_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import MAPS, read_vocabulary
from spec_lab.checkpoints.tensor_shapes import Shapes, below, layer_tensor_shapes, norms, weights

CONFIDENCE = "confidence_head.proj.weight"
NAMES: Names = ((r"^model\.", ""),)


def load_block(
    folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """Read a block drafter for a target: its config, and its tensors.

    `embed_tokens.weight` and `lm_head.weight` are left out if the file does not have them, or only as copies of the
    target's (`BlockLayout.drops_tables`). The target's are then used. With a draft vocabulary, only the rows of the
    target's head that `d2t` names are used. `d2t` and `t2d` are as in `load_eagle3`.

    Raises:
        UserError: the errors of `read_block_config`; tensors missing, of another shape, not expected or in an
            unsupported quantization; a vocabulary map that is out of range or contradicts itself.
    """
    source = str(folder)
    config, layout = read_block_config(folder, target)
    stored = renamed(stored_tensors(folder), NAMES)
    if layout.drops_tables:  # some training code stores the target's
        is_whole = config.draft_vocab_size == config.body.vocab_size
        copies = {"embed_tokens.weight"} | ({"lm_head.weight", *MAPS} if is_whole else set())
        stored = {name: it for name, it in stored.items() if not (name in copies or name.startswith("verifier_"))}
    vocabulary = read_vocabulary(stored, config.draft_vocab_size, target.vocab_size, device, source)
    if CONFIDENCE in stored:  # config keys for its width vary or are missing
        config = replace(config, confidence_reads=stored[CONFIDENCE].shape[1])
    tables = _table_shapes(config)
    optional = tables if config.body.hidden_size == target.hidden_size else ()  # the target's can replace them
    wanted = block_tensor_shapes(config) | tables
    return config, read_wanted(stored, wanted, dtype, device, source, optional) | vocabulary


def _table_shapes(config: BlockConfig) -> Shapes:
    tables = {"embed_tokens": config.body.vocab_size, "lm_head": config.draft_vocab_size}
    return weights({name: (size, config.body.hidden_size) for name, size in tables.items()})


def without_head(
    config: BlockConfig, tensors: Mapping[str, torch.Tensor]
) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """Remove the head of a block drafter, so that slots are independent.

    A confidence head that reads the Markov head's embedding is removed too.
    """
    reads = config.confidence_reads
    alone = replace(config, head=HeadSizes(), confidence_reads=reads if reads == config.body.hidden_size else 0)
    return alone, tensors_of(alone, tensors)


def tensors_of(config: BlockConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those tensors of another block drafter that one with `config` also has."""
    shapes = block_tensor_shapes(config) | _table_shapes(config)
    return {name: tensor for name, tensor in tensors.items() if name in MAPS or shapes.get(name) == tensor.shape}


def block_tensor_shapes(config: BlockConfig) -> Shapes:
    """Return the names and shapes of the tensors, as in z-lab's checkpoints, without tables and vocabulary maps."""
    hidden, conv = config.body.hidden_size, config.conv
    shapes = weights({"fc": (hidden, len(config.taps) * config.target_hidden_size)}) | norms(
        hidden, "hidden_norm", "norm"
    )
    convolutions: Shapes = {}
    if conv is not None:
        of_half = {
            "base_kernel": (2, conv.num_taps, hidden),
            "kernel_projection.weight": (2 * conv.num_taps * (hidden // conv.group_size), hidden),
        }
        convolutions = below("attention_conv", of_half) | below("mlp_conv", of_half)
    for index, plan in enumerate(config.body.layers):
        shapes |= below(f"layers.{index}", layer_tensor_shapes(plan, hidden) | convolutions)
    shapes |= config.head.tensor_shapes(config)
    confidence = {"confidence_head.proj": (1, config.confidence_reads)} if config.confidence_reads else {}
    return shapes | weights(confidence, confidence)
