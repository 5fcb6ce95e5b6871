"""What cannot work together, for Triton kernels. Functions like those of `compatibility`; imports no torch.

What only the machine at hand can tell, as with device=auto, is refused by `assembly.triton`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from spec_lab.config import RejectionConfig, RunConfig
from spec_lab.errors import not_among

KERNELS = ("torch", "triton")
TRITON = "triton"


def kernels_exist(config: RunConfig) -> str | None:
    return not_among("kernels", config.kernels, KERNELS)


def interpreted_dtype(config: RunConfig) -> str | None:
    """On a CPU the kernels run in Triton's interpreter, whose bfloat16 products are silently wrong."""
    knob = _triton_knob(config)
    if knob is None or config.device != "cpu" or config.dtype != "bfloat16":
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


def block_verification_has_no_kernel(config: RunConfig) -> str | None:
    rule = config.acceptance
    if config.kernels != TRITON or not isinstance(rule, RejectionConfig) or rule.method != "block":
        return None
    return "acceptance.method=block has no kernel in kernels=triton; use kernels=torch or acceptance.method=standard"


def _triton_knob(config: RunConfig) -> str | None:
    """The first knob that asks for Triton."""
    knobs = (("attention", config.attention.name), ("kernels", config.kernels))
    return next((knob for knob, value in knobs if value == TRITON), None)


KERNEL_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (
    kernels_exist,
    interpreted_dtype,
    triton_needs_a_device,
    block_verification_has_no_kernel,
)
