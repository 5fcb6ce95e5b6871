"""Refuses values that no trained model has, when the tensors of a checkpoint are read."""

from __future__ import annotations

from pathlib import Path

import torch

from spec_lab.core.errors import UserError

LARGEST_WEIGHT = 1e6
"""Weights of trained models stay under a few thousand. With larger ones, float32 sums of squares lose small terms."""

NEVER_ZERO = (
    *(".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".gate_proj.weight", ".up_proj.weight"),
    *("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"),
)
"""Matrices that are never initialised to zero, unlike the last matrix of a layer or a head; GGUF's names too."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite, in one pass on the device."""
    return _largest(tensor) < float("inf")


def refuse_impossible(kept: torch.Tensor, value: torch.Tensor, file: Path, tensor: str) -> None:
    """Raise UserError if a tensor has values that no model has.

    Args:
        kept: the tensor as the run holds it.
        value: the tensor before the cast to the dtype of `kept`.
        tensor: its name in the file.
    """
    largest, remedy = _largest(kept), "fetch the file again, or train again"
    if largest == 0 and tensor.endswith(NEVER_ZERO):
        raise UserError(f"{file}: {tensor} is all zeros, as after an interrupted download; {remedy}")
    if largest <= LARGEST_WEIGHT:
        return
    if not is_finite(value):
        raise UserError(f"{file}: {tensor} has NaN or infinite values; {remedy}")
    if not is_finite(kept):
        name = str(kept.dtype).removeprefix("torch.")
        raise UserError(f"{file}: {tensor} is too large for dtype={name}; use dtype=bfloat16 or float32")
    raise UserError(f"{file}: {tensor} has values of {_largest(kept):.0e}, which no trained model has; {remedy}")


def refuse_impossible_scales(scales: torch.Tensor, file: Path, tensor: str) -> None:
    """Raise UserError if a scale of an fp8 matrix is not positive: its block would become zero or change its sign."""
    if bool((scales <= 0).any()):
        raise UserError(f"{file}: {tensor} has scales that are not above 0; fetch the file again")


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, or the bits of it in e4m3: infinity if a value is NaN, 0 for a tensor that is
    empty or of integers."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    if tensor.dtype is torch.float8_e4m3fn:  # it has NaN and no infinity, and nothing above 448
        bits = float((tensor.view(torch.uint8) & 0x7F).max())
        return float("inf") if bits == 0x7F else bits
    largest = float(torch.stack(torch.aminmax(tensor)).abs().max())
    return largest if largest == largest else float("inf")
