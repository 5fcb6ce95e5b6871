"""Other projects' layouts of EAGLE-3 heads and block drafters.

Our own layout of EAGLE-3 heads is that of SpecForge and SGLang, which vLLM also reads. For block drafters it is
z-lab's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.block_checkpoint import load_block
from spec_lab.checkpoints.block_layouts import DEEPSPEC, SPECULATORS, BlockLayout
from spec_lab.checkpoints.block_writing import TABLES, write_block
from spec_lab.checkpoints.taps import SPELLINGS, Tap
from spec_lab.models.blocks.model import drafted_rows
from spec_lab.models.eagle3 import draft_to_target_ids
from spec_lab.train.checkpoint import load_drafter, load_weights, save_drafter
from spec_lab.train.frozen_target import FrozenTarget

LAYER = "midlayer."
ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
OF_HEAD = ("draft_vocab_size", "norm_before_residual", "fc_norm", "norm_output", "architectures", "torch_dtype")
"""Keys of our config.json that speculators' layout does not put into `transformer_layer_config`."""


@dataclass(frozen=True, slots=True)
class WrittenFor:
    """The target of a drafter: its name, and the hidden states that the drafter reads."""

    target: FrozenTarget
    name: str
    taps: Sequence[Tap]


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """A layout of another project.

    Attributes:
        write: takes a drafter's folder, the output folder, and the target.
        renamed: takes our name of a tensor, and returns this layout's.
        copies: the names of tensors of the target that it may contain as copies.
    """

    write: Callable[[Path, Path, WrittenFor], None]
    renamed: Callable[[str], str] = str
    copies: frozenset[str] = frozenset()

    def holds(self, folder: Path, other: Path) -> bool:
        """Return whether a folder in our layout and one in this layout hold the same tensors, apart from `copies`."""
        ours = {self.renamed(name): tensor for name, tensor in load_weights(folder).items()}
        theirs = load_weights(other)
        return set(theirs) - set(ours) <= self.copies and all(
            name in theirs and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
        )


def _write_block(layout: BlockLayout, folder: Path, output: Path, written_for: WrittenFor) -> None:
    target = written_for.target
    config, tensors = load_block(folder, target.config, torch.bfloat16, "cpu")
    tables = {"embed_tokens.weight": target.decoder.embedding, "lm_head.weight": target.head_weight}
    # Tied tensors are cloned, since a file may not hold one tensor under two names.
    copies = {name: table.bfloat16().clone() for name, table in tables.items()} if layout is DEEPSPEC else {}
    token_map = draft_to_target_ids(tensors.get("d2t"))
    if layout is SPECULATORS and token_map is not None:
        copies["lm_head.weight"] = _as_narrow_as_it_is(drafted_rows(target.head_weight.cpu(), token_map))
    write_block(output, config, copies | tensors, target.config.num_layers, layout, written_for.name)


def _as_narrow_as_it_is(table: torch.Tensor) -> torch.Tensor:
    """Return rows of the target's head in bf16 if that is exact, otherwise unchanged. Either way no value changes."""
    narrow = table.bfloat16()
    return narrow if torch.equal(narrow.to(table), table) else table


def _write_eagle3(folder: Path, output: Path, written_for: WrittenFor) -> None:
    tensors, config = load_drafter(folder)
    layer = {key: value for key, value in config.items() if key not in OF_HEAD}
    content: dict[str, Any] = {
        **speculators_config("eagle3", layer, written_for.taps, written_for.name, 3),
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        **{key: config[key] for key in ("fc_norm", "norm_output") if key in config},
    }
    save_drafter({in_speculators(name): tensor for name, tensor in tensors.items()}, content, output)


def speculators_config(
    kind: str, layer: Mapping[str, Any], taps: Sequence[Tap], target: str, num_drafts: int
) -> dict[str, Any]:
    """Return the config.json of a `kind` of head, without the keys of vocabulary and norms.

    `layer` is the config of its layers, `target` the target's name.
    """
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
    """Return a tensor's name in speculators' layout."""
    return name.replace(LAYER, "layers.0.", 1) if name.startswith(LAYER) else name


LAYOUTS: Mapping[tuple[str, str], OtherLayout] = {
    ("eagle3", "speculators"): OtherLayout(_write_eagle3, in_speculators),
    ("block", "speculators"): OtherLayout(partial(_write_block, SPECULATORS), copies=frozenset({"lm_head.weight"})),
    ("block", "deepspec"): OtherLayout(partial(_write_block, DEEPSPEC), copies=TABLES),
}
"""The layouts by kind of drafter and name. EAGLE-3 heads follow vLLM's speculators, version 0.9."""
