"""Makes the set of kernels for `kernels=`."""

from __future__ import annotations

import torch

from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet


def make_kernels(name: str, device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> KernelSet:
    """Make the kernels of a run; `name` and `row_invariant` are its knobs.

    Raises:
        UserError: Triton's interpreter would compute `dtype` wrongly, or C would read the memory of a GPU.
    """
    if name == "triton":
        refuse_wrong_dots(dtype)
        from spec_lab.operators.triton_set import triton_set

        return triton_set(dtype, row_invariant)
    if name == "native":
        if device.type == "cuda":
            raise UserError(f"kernels=native is for a CPU, not device={device}; use kernels=torch")
        from spec_lab.operators.native_set import native_set

        return native_set()
    return TORCH_FORMS


def refuse_wrong_dots(dtype: torch.dtype) -> None:
    """Raise UserError if Triton kernels of this type run in its interpreter, whose products of bfloat16 are wrong."""
    from spec_kernels.utils import INTERPRETED

    if INTERPRETED and dtype is torch.bfloat16:
        raise UserError("Triton's interpreter computes dtype=bfloat16 wrongly; use dtype=float32")
