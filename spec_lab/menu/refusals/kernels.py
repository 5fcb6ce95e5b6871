"""Checks kernels of Triton and of C. Each function is a check, as in `menu.refusals.run`. Imports no torch.

Triton's refusals that depend on the machine, as with device=auto, are in `wiring.triton`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from spec_lab.menu.choices import Dtype, KernelsChoice
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.devices import runs_on_cuda


def interpreted_dtype(chosen: Chosen) -> str | None:
    """With device=cpu, Triton's kernels run in its interpreter, whose bfloat16 products are silently wrong. So
    bfloat16 is refused."""
    config = chosen.config
    knob = _triton_knob(chosen)
    if knob is None or config.device != "cpu" or config.dtype != Dtype.bfloat16:
        return None
    return f"{knob}=triton on a CPU is Triton's interpreter, which computes dtype=bfloat16 wrongly; use dtype=float32"


def triton_needs_a_device(chosen: Chosen) -> str | None:
    """Triton needs a GPU; on a CPU it only has its interpreter, which must be asked for."""
    knob = _triton_knob(chosen)
    if knob is None or chosen.config.device != "cpu" or os.environ.get("TRITON_INTERPRET"):
        return None
    return (
        f"{knob}=triton has no CUDA device with device=cpu; use {knob}=torch, or set TRITON_INTERPRET=1 in the "
        "environment to run the kernels in Triton's interpreter, which is slow"
    )


def _triton_knob(chosen: Chosen) -> str | None:
    """Return the first knob that asks for Triton."""
    if chosen.attention.needs_triton:
        return "attention"
    return "kernels" if chosen.config.kernels == KernelsChoice.triton else None


def native_needs_a_plain_run(chosen: Chosen) -> str | None:
    """The kernels in C need a CPU, float32, the cache of attention=torch, chains, and one process."""
    config = chosen.config
    if config.kernels != KernelsChoice.native:
        return None
    wrong = {
        f"device={config.device}": (runs_on_cuda(config.device), "device=cpu"),
        f"dtype={config.dtype}": (config.dtype not in (Dtype.auto, Dtype.float32), "dtype=float32"),
        f"attention={config.attention.name}": (config.attention.name not in ("auto", "torch"), "attention=torch"),
        f"tree={config.tree.name}": (chosen.sizes is not None, "tree=none"),
        f"target.tensor_parallel={config.target.tensor_parallel}": (
            config.target.tensor_parallel > 1,
            "target.tensor_parallel=1",
        ),
    }
    found = next(((knob, remedy) for knob, (is_wrong, remedy) in wrong.items() if is_wrong), None)
    if found is None:
        return None
    knob, remedy = found
    return f"kernels=native is for float32 chains on a CPU, not {knob}; use {remedy}, or kernels=torch"


KERNEL_CHECKS: tuple[Callable[[Chosen], str | None], ...] = (
    interpreted_dtype,
    triton_needs_a_device,
    native_needs_a_plain_run,
)
