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
            numbered = layers.setdefault(match["layer"], {})
            numbered.setdefault(int(match["expert"]), {})[_USUAL.get(match["part"], match["part"])] = tensor
    result = dict(stored)
    for layer, numbered in layers.items():
        experts = [numbered[number] for number in sorted(numbered)]
        whole = [expert for expert in experts if len(expert) == sum(map(len, _STACKS.values()))]
        complete = [expert for expert in whole if _shapes(expert) == _shapes(whole[0])]
        for stack, parts in _STACKS.items() if complete else ():
            pieces = tuple(tuple(expert[part] for part in parts) for expert in complete)
            first, rows = pieces[0][0], sum(piece.shape[0] for piece in pieces[0])
            shape = (len(pieces), rows, *first.shape[1:])
            result[layer + stack] = replace(first, name=layer + stack, shape=shape, stack=pieces)
        for expert in complete:
            for tensor in expert.values():
                del result[tensor.name]
    return result


def _shapes(expert: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {part: tensor.shape for part, tensor in expert.items()}
