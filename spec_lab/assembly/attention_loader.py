"""This module makes the backend that `attention=` names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.assembly.triton import require_triton
from spec_lab.attention.long_prompts import AttendPiece, attend_by_cudnn
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.attention.torch_tree import TorchTreeAttention
from spec_lab.core.layer_protocols import AttentionBackend, RopeWrite


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The sizes and the device that an attention backend is made from.

    Attributes:
        torch_attention: the class of attention=torch, with which kernels go that attend by themselves.
    """

    page_size: int
    max_positions: int
    device: torch.device
    dtype: torch.dtype
    rope_write: RopeWrite | None = None
    torch_attention: type[TorchAttention] = TorchAttention


def torch_attention(context: BackendContext) -> AttentionBackend:
    """Make the reference backend, for any device."""
    return context.torch_attention(context.page_size, context.max_positions, context.rope_write)


def torch_tree_attention(context: BackendContext) -> AttentionBackend:
    """Make the reference backend, with masks for the rows of trees."""
    return TorchTreeAttention(context.page_size, context.max_positions, context.rope_write)


def triton_attention(context: BackendContext) -> AttentionBackend:
    """Make the backend of paged kernels, on a GPU or in Triton's interpreter."""
    require_triton("attention", context.device, context.dtype)
    from spec_lab.attention.triton_backend import TritonAttention

    return TritonAttention(context.page_size, context.max_positions, context.rope_write, _library(context))


def triton_tree_attention(context: BackendContext) -> AttentionBackend:
    """Make the backend of paged kernels, with masks for the rows of trees."""
    require_triton("attention", context.device, context.dtype)
    from spec_lab.attention.triton_backend import TritonTreeAttention

    return TritonTreeAttention(context.page_size, context.max_positions, context.rope_write, _library(context))


def _library(context: BackendContext) -> AttendPiece | None:
    """Choose what attends in long prompts: cuDNN's kernel is for 16 bits."""
    is_there = context.device.type == "cuda" and torch.backends.cudnn.is_available()
    return attend_by_cudnn if is_there and context.dtype != torch.float32 else None
