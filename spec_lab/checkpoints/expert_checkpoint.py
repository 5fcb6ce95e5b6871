"""Experts as checkpoints store them: with tensors for each expert, or with tensors for all experts of a layer.

Most files on the hub have `experts.3.up_proj.weight` (DeepSeek, GLM, Qwen3). Those of Qwen3.5 and Gemma 4 have
`experts.gate_up_proj`. transformers 5 saves Qwen3.5 in the first form and Gemma 4 in the second. The lab's layers read
the second form, in which `gate_up_proj` has gate above up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from spec_lab.checkpoints.checkpoint_files import StoredTensor

_OF_ONE_EXPERT = re.compile(
    r"(?P<layer>(?:.*\.)?experts\.)(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_USUAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral, MiniMax-M2
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def with_stacked_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with each layer's experts in two: `experts.gate_up_proj` and `experts.down_proj`.

    An expert is left unstacked if it lacks a part, or if a part has another shape than the first expert's. The check
    of names and shapes then reports its tensors, and a stack with too few experts.
    """
    layers: dict[str, dict[int, dict[str, StoredTensor]]] = {}
    for name, tensor in stored.items():
        if match := _OF_ONE_EXPERT.fullmatch(name):
            experts = layers.setdefault(match["layer"], {})
            experts.setdefault(int(match["expert"]), {})[_USUAL.get(match["part"], match["part"])] = tensor
    result = dict(stored)
    for layer, experts in layers.items():
        complete = _alike([experts[number] for number in sorted(experts)])
        for stack, parts in _STACKS.items():
            if complete:
                result[layer + stack] = _stacked(layer + stack, [tuple(e[part] for part in parts) for e in complete])
        for expert in complete:
            for tensor in expert.values():
                del result[tensor.name]
    return result


def _alike(experts: list[dict[str, StoredTensor]]) -> list[dict[str, StoredTensor]]:
    """Return the experts that have all parts, with the shapes of the first of them."""
    complete = [expert for expert in experts if len(expert) == sum(map(len, _STACKS.values()))]
    return [expert for expert in complete if _shapes(expert) == _shapes(complete[0])]


def _shapes(expert: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {part: tensor.shape for part, tensor in expert.items()}


def _stacked(name: str, pieces: list[tuple[StoredTensor, ...]]) -> StoredTensor:
    """Describe a tensor in which each expert's pieces are concatenated by rows, and the experts are stacked."""
    first = pieces[0]
    rows, columns = sum(piece.shape[0] for piece in first), first[0].shape[1:]
    return replace(first[0], name=name, shape=(len(pieces), rows, *columns), stack=tuple(pieces))
