"""Helpers for all launchers: the device to launch on, and checks of arguments."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set before triton was imported."""

next_power_of_2 = cache(triton.next_power_of_2)
"""Triton's, with its results kept, since each call takes microseconds."""


def launch_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of `tensor` is the current one.

    Raises:
        RuntimeError: kernels of this process cannot run on the tensor's device.
    """
    if tensor.is_cuda and not INTERPRETED:
        return torch.cuda.device(tensor.device)
    if tensor.device.type != "cpu" and INTERPRETED:
        raise RuntimeError(f"TRITON_INTERPRET=1 is for CPU tensors, not for {tensor.device}; unset it")
    if not INTERPRETED:
        raise RuntimeError("a Triton kernel needs a CUDA tensor, or TRITON_INTERPRET=1 before triton is imported")
    return nullcontext()


def assert_rows_of(tensor: torch.Tensor, *shape: int) -> None:
    """Assert that `tensor` has this shape and a contiguous last dimension, so that only the other strides must be
    passed."""
    assert tuple(tensor.shape) == shape, f"expected {shape}, got {tuple(tensor.shape)}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def assert_whole(tensors: Iterable[torch.Tensor], *shape: int) -> None:
    """Assert that tensors have this shape and are contiguous."""
    for tensor in tensors:
        assert tuple(tensor.shape) == shape, f"expected {shape}, got {tuple(tensor.shape)}"
        assert tensor.is_contiguous()
