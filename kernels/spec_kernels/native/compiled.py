"""Passes tensors, positions and cache slots to the compiled functions of kernels=native."""

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


def describe_place(
    rotary: tuple[torch.Tensor, torch.Tensor] | None, slots: torch.Tensor | None, keys: tuple[Any, ...] | None
) -> Any:
    """Describe the places of rows: (cos, signed sin), the slots that they write, and (pages, lengths, num_queries)."""
    place = _Place()
    if rotary is not None and slots is not None:
        cos, signed_sin = rotary
        assert cos.stride(0) == signed_sin.stride(0) and cos.stride(-1) == signed_sin.stride(-1) == 1
        assert slots.is_contiguous()
        place.cos, place.signed_sin, place.slots = cos.data_ptr(), signed_sin.data_ptr(), slots.data_ptr()
        place.rotary_stride = cos.stride(0)
    if keys is not None:
        pages, lengths, num_queries = keys
        assert pages.is_contiguous() and lengths.is_contiguous()
        place.pages, place.lengths = pages.data_ptr(), lengths.data_ptr()
        place.num_pages, place.num_queries = pages.shape[1], num_queries
    return place


def check_places(*tensors: torch.Tensor) -> None:
    assert all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in tensors)


def float_rows(rows: torch.Tensor) -> int:
    assert rows.dtype is torch.float32 and rows.is_contiguous()
    return rows.data_ptr()
