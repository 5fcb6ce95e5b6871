"""A head in the layout of another project: read, written, read back, and compared.

An EAGLE-3 head's own layout is that of SpecForge, SGLang and vLLM (`hf`), and a block drafter's that of z-lab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.checkpoints.block_checkpoint import load_block
from spec_lab.checkpoints.block_layouts import BY_ARCHITECTURE, DEEPSPEC, SPECULATORS, SPECULATORS_DEFAULTS, ZLAB
from spec_lab.checkpoints.checkpoint import read_tensors, stored_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config, load_eagle3
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.json_input import read_json
from spec_lab.checkpoints.mtp_checkpoint import find_layout
from spec_lab.core.errors import UserError
from spec_lab.export.block_json import TABLES, block_json
from spec_lab.export.eagle3_json import EAGLE3_LAYOUTS, write_eagle3_folder
from spec_lab.export.folders import as_narrow_as_it_is, save_folder

EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
HEAD = "lm_head.weight"


class Kind(StrEnum):
    """What a folder or a file holds."""

    target = "target"
    eagle3 = "eagle3"
    p_eagle = "p_eagle"
    block = "block"
    mtp = "mtp"
    assistant = "assistant"


LAYOUTS: Mapping[Kind, Mapping[str, Any]] = {
    Kind.eagle3: {name: name for name in EAGLE3_LAYOUTS},
    Kind.p_eagle: {"speculators": "speculators"},
    Kind.block: {"hf": ZLAB, "speculators": SPECULATORS, "deepspec": DEEPSPEC},
}


def kind_of(path: Path) -> Kind:
    """Return what a checkpoint holds, by its config.json and the names of its tensors."""
    if is_gguf(path):
        return Kind.target
    config = read_json(path / "config.json")
    names, of_speculators = config.get("architectures") or [], config.get("speculators_model_type")
    if of_speculators == "peagle":
        return Kind.p_eagle
    if of_speculators == "eagle3" or any("eagle3" in name.lower() for name in names):
        return Kind.eagle3
    if of_speculators in SPECULATORS_DEFAULTS or any(name in BY_ARCHITECTURE for name in names):
        return Kind.block
    if any("Assistant" in name for name in names):
        return Kind.assistant
    stored = stored_tensors(path)
    is_module = not any(name in stored for name in EMBEDDINGS)
    if is_module and find_layout(stored, (config.get("num_hidden_layers") or 0)) is not None:
        return Kind.mtp
    return Kind.target


def write_layout(layout: str, folder: Path, output: Path, target: Path, num_drafts: int) -> None:
    """Write the head in `folder` into `output`, read it back, and compare.

    Args:
        layout: one of `LAYOUTS`.
        target: the folder or GGUF file of the head's target.
        num_drafts: the drafts of a round that speculators' config proposes for an EAGLE-3 head.

    Raises:
        UserError: a layout that is not known for the head, or that has no place for a part of it.
    """
    kind, model = kind_of(folder), read_model_config(target)
    known: Mapping[str, Any] = LAYOUTS.get(kind, {})
    if layout not in known:
        others = f"it has {' and '.join(known)}" if known else "its folder is as others read it"
        raise UserError(f"{folder}: the layout {layout} is not known for a head of kind {kind}; {others}")
    config, tensors = _loaded(kind, folder, model)
    kept = {name: as_narrow_as_it_is(tensor) for name, tensor in tensors.items()}
    if isinstance(config, Eagle3Config):
        write_eagle3_folder(output, config, kept, layout, model.num_layers, num_drafts=num_drafts, target=target.name)
    else:
        copies = {name: table for name, table in _copies(layout, target, kept).items() if name not in kept}
        save_folder(copies | kept, block_json(config, model.num_layers, known[layout], target.name), output)
    _require_same(layout, (config, tensors), _loaded(kind, output, model))


def _loaded(kind: Kind, folder: Path, model: ModelConfig) -> tuple[Any, dict[str, Tensor]]:
    """Read a head in float32."""
    if kind == Kind.block:
        return load_block(folder, model, torch.float32, "cpu")
    return load_eagle3(folder, model, torch.float32, "cpu", "peagle" if kind == Kind.p_eagle else "eagle3")


def _require_same(layout: str, ours: tuple[Any, dict[str, Tensor]], theirs: tuple[Any, dict[str, Tensor]]) -> None:
    """Refuse a layout that has no place for a part of a head: it came back as another. Copies of the target's tensors
    may be added."""
    (config, tensors), (other, others) = ours, theirs
    lost = [field.name for field in fields(config) if getattr(config, field.name) != getattr(other, field.name)]
    if lost:
        raise UserError(f"the layout {layout} cannot hold this drafter's {', '.join(lost)}")
    assert others.keys() >= tensors.keys() and others.keys() - tensors.keys() <= TABLES
    differing = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert not differing, f"these tensors came back as others: {differing}"


def _copies(layout: str, target: Path, head: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the target's tensors that a block drafter's file has in a layout: with DeepSpec both tables, with
    speculators the rows of the LM head that can be drafted, if not all can."""
    if layout == DEEPSPEC.name:
        return target_tables(target)
    if layout == SPECULATORS.name and "d2t" in head:
        rows = head["d2t"] + torch.arange(len(head["d2t"]))
        return {HEAD: target_tables(target)[HEAD][rows]}
    return {}


def target_tables(path: Path) -> dict[str, Tensor]:
    """Read a target's embedding and LM head, [vocab, hidden] each, as narrow as they are; two tensors even if tied."""
    stored = stored_tensors(path)
    named = {name: stored[name] for name in (*EMBEDDINGS, HEAD) if name in stored}
    read = read_tensors(named, torch.float32, "cpu")
    embedding = as_narrow_as_it_is(next(read[name] for name in EMBEDDINGS if name in read))
    return {"embed_tokens.weight": embedding, HEAD: as_narrow_as_it_is(read.get(HEAD, embedding)).clone()}
