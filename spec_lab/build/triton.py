"""Refuses runs that ask for Triton kernels if these cannot run."""

from __future__ import annotations

import torch

from spec_lab.core.errors import UserError


def require_triton(knob: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error if Triton kernels cannot run. `knob` is the option that asks for them: attention or kernels.

    Triton exists only for Linux, so it is not imported at module level.

    Raises:
        UserError: Triton is missing, the device cannot run its kernels, or the interpreter computes `dtype` wrong.
    """
    try:
        from spec_kernels.utils import INTERPRETED
    except ModuleNotFoundError as error:
        raise UserError(f"{knob}=triton: {error}; use {knob}=torch") from error
    if device.type == "cpu" and not INTERPRETED:
        where = "device=cpu is" if torch.cuda.is_available() else "this torch sees"
        raise UserError(
            f"{knob}=triton: {where} no CUDA device; use {knob}=torch, or set TRITON_INTERPRET=1 in the environment to "
            "run the kernels in Triton's interpreter, which is slow"
        )
    if device.type == "cuda" and INTERPRETED:
        raise UserError(f"{knob}=triton: TRITON_INTERPRET=1 is for a CPU; unset it, or use device=cpu")
    if dtype is torch.bfloat16 and INTERPRETED:
        raise UserError(f"{knob}=triton: Triton's interpreter computes bfloat16 wrongly; use dtype=float32")
