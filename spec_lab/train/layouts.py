"""Other projects' layouts of an EAGLE-3 head. Ours is SpecForge's and SGLang's, which vLLM reads too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.taps import SPELLINGS, Tap
from spec_lab.train.checkpoint import load_drafter, load_weights, save_drafter

LAYER = "midlayer."
ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
OF_HEAD = ("draft_vocab_size", "norm_before_residual", "fc_norm", "norm_output", "architectures", "torch_dtype")
"""Keys that stand beside the layer's in speculators' config."""


def write_speculators(folder: Path, output: Path, taps: Sequence[Tap], target: str) -> None:
    """Write the head of `folder` as vLLM's speculators has it (version 0.9); `target` is its verifier's name."""
    tensors, config = load_drafter(folder)
    layer = {key: value for key, value in config.items() if key not in OF_HEAD}
    content: dict[str, Any] = {
        **speculators_config("eagle3", layer, taps, target, 3),
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        **{key: config[key] for key in ("fc_norm", "norm_output") if key in config},
    }
    save_drafter({in_speculators(name): tensor for name, tensor in tensors.items()}, content, output)


def speculators_config(
    kind: str, layer: Mapping[str, Any], taps: Sequence[Tap], target: str, num_drafts: int
) -> dict[str, Any]:
    """Return what a head of a kind, whose layers are `layer`, has in its config besides its vocabulary and norms."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": dict(layer),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": SPELLINGS["hidden_states"].write(taps),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def in_speculators(name: str) -> str:
    """Return a tensor's name there."""
    return name.replace(LAYER, "layers.0.", 1) if name.startswith(LAYER) else name


def same_bytes(folder: Path, other: Path, renamed: Callable[[str], str]) -> bool:
    """Tell whether two folders hold the same tensors, but for their names."""
    ours, theirs = load_weights(folder), load_weights(other)
    return {renamed(name) for name in ours} == set(theirs) and all(
        torch.equal(tensor, theirs[renamed(name)]) for name, tensor in ours.items()
    )


LAYOUTS: Mapping[str, tuple[Callable[[Path, Path, Sequence[Tap], str], None], Callable[[str], str]]] = {
    "speculators": (write_speculators, in_speculators),
}
"""Of each layout what writes it, and how it names a tensor."""
