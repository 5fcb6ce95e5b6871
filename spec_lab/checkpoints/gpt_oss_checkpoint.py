"""The experts of gpt-oss as its checkpoints store them, in MXFP4 or widened.

The rows of gate and up alternate there, and every product of an expert has a bias. Widened matrices are stored
transposed. The lab's layers read gate above up. In MXFP4 (OCP Microscaling Formats 1.0) 32 values of a row share an
exponent, and each is one of 16 numbers, two in a byte, the first in its low half. So bfloat16 holds them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from spec_lab.checkpoints.checkpoint_files import Packed, StoredTensor
from spec_lab.checkpoints.widening import e2m1

EXPONENT_BIAS = 127
IN_A_BYTE = 2


def with_experts_of_gpt_oss(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors under the names and in the forms that layers of experts have here."""
    if not any(name.endswith(".mlp.experts.gate_up_proj_bias") for name in stored):
        return dict(stored)
    result: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = name.replace(".mlp.router.", ".mlp.gate.").removesuffix("_blocks")
        if name.endswith("_blocks"):
            experts, rows, groups, in_group = tensor.shape
            parts = {"blocks": tensor, "scales": stored[f"{own}_scales"]}
            form = gate_above_up if own.endswith("gate_up_proj") else None
            shape = experts, rows, groups * in_group * IN_A_BYTE
            result[own] = replace(tensor, shape=shape, dtype="BF16", packed=Packed(parts, widened), form=form)
        elif own.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            turned = turned_gate_above_up if own.endswith("gate_up_proj") else turn
            result[own] = replace(tensor, shape=(experts, rows, columns), form=turned)
        elif own.endswith("experts.gate_up_proj_bias"):
            result[own] = replace(tensor, form=gate_above_up)
        elif not own.endswith("_scales"):
            result[own] = tensor
    return result


def gate_above_up(rows: torch.Tensor) -> torch.Tensor:
    """Put the even rows of each expert [experts, rows, ...] above the odd ones."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def turn(stored: torch.Tensor) -> torch.Tensor:
    """Transpose each expert."""
    return stored.transpose(1, 2)


def turned_gate_above_up(stored: torch.Tensor) -> torch.Tensor:
    """Transpose each expert [experts, columns, rows], and put its even rows above the odd ones."""
    return gate_above_up(turn(stored))


def widened(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the values [..., groups * 32] of MXFP4 in bfloat16: `blocks` [..., groups, 16], and `scales` [..., groups]
    with their exponents, both uint8."""
    blocks, exponents = parts["blocks"], parts["scales"]
    return torch.ldexp(e2m1(blocks).bfloat16(), exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(-2)
