"""Refuses what kernels of Triton and of C cannot work with. Functions like those of `compatibility.run`; no torch.

What only the machine at hand can tell, as with device=auto, is refused by `assembly.triton`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from spec_lab.assembly import registry
from spec_lab.assembly.devices import runs_on_cuda
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import Dtype, KernelSet, RunConfig


def interpreted_dtype(config: RunConfig) -> str | None:
    """The kernels run in Triton's interpreter on a CPU, whose bfloat16 products are silently wrong."""
    knob = _triton_knob(config)
    if knob is None or config.device != "cpu" or config.dtype != Dtype.bfloat16:
        return None
    return f"{knob}=triton on a CPU is Triton's interpreter, which gets dtype=bfloat16 wrong; use dtype=float32"


def triton_needs_a_device(config: RunConfig) -> str | None:
    """Triton compiles for a GPU; on a CPU it has its interpreter alone, which must be asked for."""
    knob = _triton_knob(config)
    if knob is None or config.device != "cpu" or os.environ.get("TRITON_INTERPRET"):
        return None
    return (
        f"{knob}=triton has no CUDA device with device=cpu; use {knob}=torch, or set TRITON_INTERPRET=1 in the "
        "environment to run the kernels in Triton's interpreter, which is slow"
    )


def _triton_knob(config: RunConfig) -> str | None:
    """Return the first knob that asks for Triton."""
    if registry.of(config).attention(config).needs_triton:
        return "attention"
    return "kernels" if config.kernels == KernelSet.triton else None


def native_needs_a_plain_run(config: RunConfig) -> str | None:
    """The kernels in C know float32, the cache of attention=torch, chains, and one thread."""
    if config.kernels != KernelSet.native:
        return None
    wrong = {
        f"device={config.device}": (runs_on_cuda(config.device), "device=cpu"),
        f"dtype={config.dtype}": (config.dtype not in (Dtype.auto, Dtype.float32), "dtype=float32"),
        f"attention={config.attention.name}": (config.attention.name not in ("auto", "torch"), "attention=torch"),
        f"tree={config.tree.name}": (tree_sizes(config) is not None, "tree=none"),
        f"num_threads={config.num_threads}": (config.num_threads not in (None, 1), "num_threads=1"),
        f"target.tensor_parallel={config.target.tensor_parallel}": (
            config.target.tensor_parallel > 1,
            "target.tensor_parallel=1",
        ),
    }
    found = next(((knob, remedy) for knob, (is_wrong, remedy) in wrong.items() if is_wrong), None)
    if found is None:
        return None
    knob, remedy = found
    return f"kernels=native is for float32 chains on one thread of a CPU, not {knob}; use {remedy}, or kernels=torch"


KERNEL_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (
    interpreted_dtype,
    triton_needs_a_device,
    native_needs_a_plain_run,
)
