"""The compiled functions of kernels=native, and how tensors and the places of rows are handed to them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from spec_kernels.native.build import build


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "signed_sin", "positions", "slots", "pages", "lengths")),
        *((name, ctypes.c_int64) for name in ("rotary_stride", "num_pages", "num_queries")),
    )


def pointer_to(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def library() -> ctypes.CDLL:
    """Return the compiled functions; OSError where the system loads no library from where it lies."""
    compiled = ctypes.CDLL(str(build()))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    compiled.native_layer.argtypes = (*(pointer,) * 7, number, number)
    compiled.native_layers.argtypes = (pointer, number, pointer, pointer, pointer, number, pointer, number)
    compiled.native_draft_layer.argtypes = (*(pointer,) * 7, number, number)
    compiled.native_project.argtypes = (pointer, pointer, pointer, pointer, pointer, number)
    compiled.native_attend.argtypes = (pointer, pointer, pointer, pointer, pointer, number, number)
    compiled.native_finish.argtypes = (pointer, pointer, pointer, pointer, number)
    compiled.native_norm.argtypes = (pointer, pointer, pointer, number, number)
    compiled.native_product.argtypes = (pointer, pointer, pointer, number)
    compiled.native_likeliest.argtypes = (pointer, pointer, pointer, pointer, pointer, number)
    compiled.native_draft_input.argtypes = (pointer, pointer, pointer, number, pointer, pointer, pointer, number)
    compiled.native_strict.argtypes = (*(pointer,) * 4, number, pointer, pointer, *(number,) * 3)
    compiled.native_build.argtypes = (*(pointer,) * 6, *(number,) * 5)
    compiled.native_catchup.argtypes = (*(pointer,) * 4, *(number,) * 6)
    compiled.native_commit.argtypes = (*(pointer,) * 7, *(number,) * 5)
    compiled.native_draft_start.argtypes = (*(pointer,) * 13, *(number,) * 4)
    compiled.native_draft_steps.argtypes = (*(pointer,) * 13, *(number,) * 3)
    compiled.native_advance.argtypes = (*(pointer,) * 4, *(number,) * 4)
    return compiled


@cache
def has_tiles() -> bool:
    """Tell whether this process may multiply by tile registers: by processor, compiler, and the system's consent."""
    return bool(library().native_has_tiles())


def check(status: int) -> None:
    if status:
        raise MemoryError("kernels=native: no memory for intermediate rows")


def describe_place(
    rotary: tuple[torch.Tensor, torch.Tensor] | None, slots: torch.Tensor | None, keys: tuple[Any, ...] | None
) -> Any:
    """Describe where rows stand: (cos, signed sin), the slots that they write, and (pages, lengths, num_queries)."""
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
