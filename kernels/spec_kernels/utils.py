"""Every launcher needs these: the device to launch on, and a check of what it is given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Says whether this process's kernels run in Triton's interpreter: TRITON_INTERPRET=1 before triton is imported."""


def launch_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return the context of a launch that works on `tensor`: its device is the current one.

    Raises:
        RuntimeError: the tensor is where no kernel of this process can run.
    """
    if tensor.is_cuda and not INTERPRETED:
        return torch.cuda.device(tensor.device)
    if tensor.device.type != "cpu":
        raise RuntimeError(f"TRITON_INTERPRET=1 is for CPU tensors, not for {tensor.device}; unset it")
    if not INTERPRETED:
        raise RuntimeError("a Triton kernel needs a CUDA tensor, or TRITON_INTERPRET=1 before triton is imported")
    return nullcontext()


def assert_rows_of(tensor: torch.Tensor, *shape: int) -> None:
    """Assert that `tensor` has this shape and a contiguous last dimension, so that only the other strides have to be
    passed."""
    assert tuple(tensor.shape) == shape, f"expected {shape}, got {tuple(tensor.shape)}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
