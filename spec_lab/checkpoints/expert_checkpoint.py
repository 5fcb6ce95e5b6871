"""Experts as checkpoints store them: with tensors for each expert, or with tensors for all experts of a layer.

Most files on the hub have `experts.3.up_proj.weight` (DeepSeek, GLM, Qwen3). Those of Qwen3.5 and Gemma 4 have
`experts.gate_up_proj`. transformers 5 saves Qwen3.5 in the first form and Gemma 4 in the second. The lab's layers read
the second form, in which `gate_up_proj` has gate above up.

gpt-oss has its own. The rows of gate and up alternate there, and every product of an expert has a bias. Widened
matrices are stored transposed. In MXFP4 (OCP Microscaling Formats 1.0) 32 values of a row share an exponent, and each
is one of 16 numbers, two in a byte, the first in its low half. So bfloat16 holds them exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.widening import e2m1

_OF_ONE_EXPERT = re.compile(
    r"(?P<layer>(?:.*\.)?experts\.)(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_USUAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral, MiniMax-M2
EXPONENT_BIAS = 127
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
        complete = [it for it in whole if all(it[part].shape == whole[0][part].shape for part in it)]
        for stack, parts in _STACKS.items() if complete else ():
            pieces = tuple(tuple(expert[part] for part in parts) for expert in complete)
            first, rows = pieces[0][0], sum(piece.shape[0] for piece in pieces[0])
            shape = (len(pieces), rows, *first.shape[1:])
            result[layer + stack] = replace(first, name=layer + stack, shape=shape, stack=pieces)
        for expert in complete:
            for tensor in expert.values():
                del result[tensor.name]
    return result


def with_experts_of_gpt_oss(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors under the names and in the forms that layers of experts have here."""
    if not any(name.endswith(".mlp.experts.gate_up_proj_bias") for name in stored):
        return dict(stored)
    result: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = name.replace(".mlp.router.", ".mlp.gate.").removesuffix("_blocks")
        if name.endswith("_blocks"):
            experts, rows, groups, in_group = tensor.shape
            shape = experts, rows, 2 * groups * in_group
            form = Mxfp4Experts(own.endswith("experts.gate_up_proj"))
            tensor = tensor.made(form, stored[f"{own}_scales"], shape=shape, dtype="BF16")
        elif own.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor = tensor.made(lambda experts: experts.transpose(1, 2).contiguous())
            tensor = tensor.made(gate_above_up) if own.endswith("gate_up_proj") else tensor
        elif own.endswith("experts.gate_up_proj_bias"):
            tensor = tensor.made(gate_above_up)
        if not own.endswith("_scales"):
            result[own] = tensor
    return result


def gate_above_up(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows [experts, rows, ...] of gate before those of up, with which they alternate."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Widens experts in MXFP4; `alternates` says whether they are those of `gate_above_up`."""

    alternates: bool

    def __call__(self, blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        return self.in_order(widened(blocks, exponents))

    def codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the codes [experts, rows, inputs] of blocks [experts, rows, groups, 16]."""
        return self.in_order(torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(2))

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        return gate_above_up(rows) if self.alternates else rows


def widened(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values [..., groups * 32] of MXFP4 in bfloat16: `blocks` [..., groups, 16], and `exponents`
    [..., groups], both uint8."""
    return torch.ldexp(e2m1(blocks).bfloat16(), exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(-2)
