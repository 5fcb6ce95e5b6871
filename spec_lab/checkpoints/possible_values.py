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
    largest = _largest(kept)
    if largest <= LARGEST_WEIGHT and (largest > 0 or not tensor.endswith(NEVER_ZERO)):
        return
    found = "all zeros, as after an interrupted download" if largest == 0 else f"values of {largest:.0e}"
    if not is_finite(kept) and is_finite(value):
        found = f"values too large for dtype={str(kept.dtype).removeprefix('torch.')}"
    elif not is_finite(value):
        found = "NaN or infinite values"
    raise UserError(f"{file}: {tensor} has {found}, which no trained model has")


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
