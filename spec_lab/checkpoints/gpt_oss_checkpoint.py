"""The experts of gpt-oss as its checkpoints store them, in MXFP4 or widened.

The rows of gate and up alternate there, and every product of an expert has a bias. Widened matrices are stored
transposed. The lab's layers read gate above up. In MXFP4 (OCP Microscaling Formats 1.0) 32 values of a row share an
exponent, and each is one of 16 numbers, two in a byte, the first in its low half. So bfloat16 holds them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spec_lab.checkpoints.checkpoint_files import StoredTensor
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
            shape = experts, rows, groups * in_group * IN_A_BYTE
            tensor = tensor.made(widened, stored[f"{own}_scales"], shape=shape, dtype="BF16")
        elif own.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor = tensor.made(lambda experts: experts.transpose(1, 2))
        if own.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            tensor = tensor.made(lambda rows: torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1))  # gate above up
        if not own.endswith("_scales"):
            result[own] = tensor
    return result


def widened(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values [..., groups * 32] of MXFP4 in bfloat16: `blocks` [..., groups, 16], and `exponents`
    [..., groups], both uint8."""
    return torch.ldexp(e2m1(blocks).bfloat16(), exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(-2)
