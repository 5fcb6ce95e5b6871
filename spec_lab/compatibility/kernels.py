"""Refuses what Triton kernels cannot work with. Functions like those of `compatibility.run`; imports no torch.

What only the machine at hand can tell, as with device=auto, is refused by `assembly.triton`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from spec_lab.assembly import registry
from spec_lab.config import Dtype, KernelSet, RunConfig


def interpreted_dtype(config: RunConfig) -> str | None:
    """The kernels run in Triton's interpreter on a CPU, whose bfloat16 products are silently wrong."""
    knob = _triton_knob(config)
    if knob is None or config.device != "cpu" or config.dtype != Dtype.bfloat16:
        return None
    return f"{knob}=triton on a CPU is Triton's interpreter, which gets dtype=bfloat16 wrong; use dtype=float32"


def triton_needs_a_device(config: RunConfig) -> str | None:
    knob = _triton_knob(config)
    if knob is None or config.device != "cpu" or os.environ.get("TRITON_INTERPRET"):
        return None
    return (
        f"{knob}=triton has no CUDA device with device=cpu; use {knob}=torch, or set TRITON_INTERPRET=1 in the "
        "environment to run the kernels in Triton's interpreter, which is slow"
    )


def _triton_knob(config: RunConfig) -> str | None:
    """The first knob that asks for Triton."""
    if registry.of(config).attention(config).needs_triton:
        return "attention"
    return "kernels" if config.kernels == KernelSet.triton else None


KERNEL_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (interpreted_dtype, triton_needs_a_device)
