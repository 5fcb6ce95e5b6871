"""Layouts of other projects, written besides a head's own, and compared with it.

An EAGLE-3 head's own layout is that of SpecForge, SGLang and vLLM, and a block drafter's that of z-lab.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spec_lab.checkpoints.block_writing import TABLES
from spec_lab.checkpoints.taps import SPELLINGS, Tap
from spec_lab.train.checkpoint import load_drafter

if TYPE_CHECKING:
    from spec_lab.train.proof import Prover

ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}


def write_layouts(names: Iterable[str], folder: Path, prover: Prover) -> None:
    """Write a head's folder in other layouts, each into a folder within it, and read each back.

    Raises:
        UserError: a layout that is not known for the head, or that cannot hold it.
        NotServed: the engine's logits are not those of the head's own layout.
    """
    for name in names:
        prover.head.write_as(name, folder, folder / name, prover.target, prover.path.name)
        assert hold_the_same(folder, folder / name)
        prover.require_same(folder, folder / name)


def hold_the_same(folder: Path, other: Path) -> bool:
    """Return whether two layouts hold the same tensors, apart from copies of the target's."""
    theirs = load_drafter(other)[0]
    ours = {
        name if name in theirs else in_speculators(name): tensor for name, tensor in load_drafter(folder)[0].items()
    }
    same = all(name in theirs and torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    return same and set(theirs) - set(ours) <= TABLES


def as_narrow_as_it_is(table: Tensor) -> Tensor:
    """Return a table in bfloat16 if that is exact, otherwise unchanged."""
    narrow = table.bfloat16()
    return narrow if torch.equal(narrow.to(table), table) else table


def in_speculators(name: str) -> str:
    """Return the name of an EAGLE-3 or P-EAGLE head's tensor in speculators' layout."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def speculators_config(
    kind: str, layer: Mapping[str, Any], taps: Sequence[Tap], num_drafts: int, target: str
) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 or P-EAGLE head in the layout of speculators, version 0.9, without the keys of
    vocabulary and norms. `layer` is the config of its layers, and `target` the target's name."""
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
