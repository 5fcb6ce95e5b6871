"""A tiny random target and a drafter of every kind for it, changed so that some drafts are right and some are wrong.

Random pairs never agree, and a drafter that is never right tests half of a round. So the target is made to look more at
its last token than at others, and each drafter to guess from that token alone: both then follow about the same bigrams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_blocks import TinyBlock, make_tiny_p_eagle, write_block
from tests.tiny_checkpoints import keep_first_layers, make_tiny_eagle3, rewrite_tensors
from tests.tiny_mtp import make_tiny_mtp

OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""What attention and MLP add to the residual stream: the smaller, the more a row is its own token's embedding."""


@dataclass(frozen=True)
class Target:
    """A target's folder, its configuration and its tensors by name."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]


def teach_drafters(target_folder: Path, folder: Path) -> dict[str, Path]:
    """Change the target in place, and write a drafter of each kind that has weights; return their folders by name."""
    quiet(target_folder, 0.45)
    target = Target(target_folder, read_model_config(target_folder), load_file(target_folder / "model.safetensors"))
    folders = {name: folder / name for name in TEACHERS}
    for name, teach in TEACHERS.items():
        teach(folders[name], target)
    return folders


def quiet(folder: Path, scale: float) -> None:
    """Scale what attention and MLP of every layer add."""
    tensors = load_file(folder / "model.safetensors")
    rewrite_tensors(folder, {name: scale * tensor for name, tensor in tensors.items() if name.endswith(OUTPUTS)})


def teach_eagle3(folder: Path, target: Target) -> None:
    """Write a head whose attention copies the embedding of the rows with the same token, under the target's norm and
    head.
    """
    head = make_tiny_eagle3(folder, target.config)
    rewrite_tensors(
        folder,
        copying_head(head, target, "midlayer.") | {"lm_head.weight": target.tensors["lm_head.weight"][head["t2d"]]},
    )


def copying_head(head: Mapping[str, torch.Tensor], target: Target, layer: str) -> dict[str, torch.Tensor]:
    """Return what makes a head's first layer, whose names begin with `layer`, copy embeddings."""
    eye, attention = torch.eye(32), f"{layer}self_attn."
    pick_embedding = torch.cat((eye, torch.zeros(32, 32)), dim=1)
    return {
        "fc.weight": 0.2 * head["fc.weight"],
        f"{layer}mlp.down_proj.weight": 0.2 * head["midlayer.mlp.down_proj.weight"],
        f"{layer}input_layernorm.weight": torch.ones(32),
        f"{attention}v_proj.weight": pick_embedding,
        f"{attention}k_proj.weight": 2 * pick_embedding,
        f"{attention}q_proj.weight": 2 * pick_embedding.view(2, 16, 64).repeat_interleave(2, dim=0).view(64, 64),
        f"{attention}o_proj.weight": eye.view(32, 2, 16).repeat_interleave(2, dim=1).reshape(32, 64) / 2,
        "norm.weight": target.tensors["model.norm.weight"],
        "lm_head.weight": target.tensors["lm_head.weight"],
    }


def teach_draft_model(folder: Path, target: Target) -> None:
    """Write a draft model of the target's first layers, under its norm and head."""
    keep_first_layers(folder, target.folder, 3)


def teach_mtp_eagle(folder: Path, target: Target) -> None:
    """Write one module, which hands on the embedding and a little of the hidden state."""
    make_tiny_mtp(folder, "ours", target.config)
    projection = load_file(folder / "model.safetensors")["model.layers.8.eh_proj.weight"][:, 32:]
    _teach_module(folder, 8, 0.2 * projection, target)
    quiet(folder, 0.1)


def teach_mtp_vanilla(folder: Path, target: Target) -> None:
    """Write three modules of the same kind, which differ in their layers."""
    make_tiny_mtp(folder, "ours", target.config, num_modules=3)
    for layer in (8, 9, 10):
        _teach_module(folder, layer, 0.1 * torch.eye(32), target)
    quiet(folder, 0.2)


def _teach_module(folder: Path, layer: int, hidden_projection: torch.Tensor, target: Target) -> None:
    changes = {
        "enorm.weight": torch.ones(32),
        "eh_proj.weight": torch.cat((torch.eye(32), hidden_projection), dim=1),
        "shared_head.norm.weight": target.tensors["model.norm.weight"],
    }
    rewrite_tensors(folder, {f"model.layers.{layer}.{name}": tensor for name, tensor in changes.items()})


def teach_frozen_kv(folder: Path, target: Target) -> None:
    """Write an assistant that puts the last token's embedding under the target's norm and head, and recycles what it
    has.
    """
    tensors = make_tiny_assistant(folder, target.config, hidden_size=32)
    eye = torch.eye(32)
    rewrite_tensors(
        folder,
        {
            name: 0.2 * tensor
            for name, tensor in tensors.items()
            if "post_" in name and name.endswith("layernorm.weight")
        }
        | {
            "pre_projection.weight": torch.cat((eye, 0.1 * eye), dim=1),
            "model.norm.weight": target.tensors["model.norm.weight"],
            "model.embed_tokens.weight": target.tensors["lm_head.weight"],
        },
    )


def teach_dflash(folder: Path, target: Target) -> None:
    """Write a block of eight rows whose Markov head has the target's bigrams, under a body that says little."""
    block = TinyBlock(head="markov", anchor_first=True, confidence=True, block_size=8, rank=32)
    tensors = write_block(folder, block, target.config)
    embedding = target.tensors["model.embed_tokens.weight"]
    normed = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt() * target.tensors["model.norm.weight"]
    rewrite_tensors(
        folder,
        {
            "norm.weight": 0.1 * tensors["norm.weight"],
            "markov_head.markov_w1.weight": normed,
            "markov_head.markov_w2.weight": target.tensors["lm_head.weight"],
        },
    )


def teach_p_eagle(folder: Path, target: Target) -> None:
    """Write a head of two layers that say little, so that its first draft goes by the token before."""
    head = make_tiny_p_eagle(folder, target.config, draft_vocab_size=target.config.vocab_size)
    behind = {name: tensor for name, tensor in head.items() if name.startswith("layers.1.")}
    rewrite_tensors(
        folder,
        {name: 0.2 * tensor for name, tensor in behind.items() if name.endswith(OUTPUTS)}
        | copying_head(head, target, "layers.0."),
    )


TEACHERS = {
    "eagle3": teach_eagle3,
    "draft_model": teach_draft_model,
    "mtp_eagle": teach_mtp_eagle,
    "mtp_vanilla": teach_mtp_vanilla,
    "frozen_kv": teach_frozen_kv,
    "hybrid": teach_eagle3,
    "dflash": teach_dflash,
    "p_eagle": teach_p_eagle,
}
