"""What the calls of kernels=native share: the places of rows, threads, and failures."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from spec_kernels.native.build import library


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "signed_sin", "positions", "slots", "pages", "lengths")),
        *((name, ctypes.c_int64) for name in ("rotary_stride", "num_pages", "num_queries")),
    )


def pointer_to(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def has_tiles() -> bool:
    """Return whether this process may use tile registers (AMX): processor, compiler and system must support them."""
    return bool(library().native_has_tiles())


def use_threads(num_threads: int) -> int:
    """Let `num_threads` threads share the outputs of large products and the heads of attention. Return their actual
    number, which is at most 256, and lower if the system refuses some. No bit of a result depends on it."""
    return int(library().native_threads(num_threads))


def check(status: int) -> None:
    if status:
        raise MemoryError("kernels=native: no memory for intermediate rows")


def describe_keys(pages: torch.Tensor, lengths: torch.Tensor, num_queries: int) -> Any:
    """Describe the keys of the rows of a forward; the rest of a place is to be set."""
    assert pages.is_contiguous() and lengths.is_contiguous()
    return _Place(pages=pages.data_ptr(), lengths=lengths.data_ptr(), num_pages=pages.shape[1], num_queries=num_queries)
