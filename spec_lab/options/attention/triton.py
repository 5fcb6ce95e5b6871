"""attention=triton: paged kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.menu.option import AttentionOption

if TYPE_CHECKING:
    from spec_lab.attention.long_prompts import AttendPiece
    from spec_lab.core.layer_protocols import AttentionBackend
    from spec_lab.wiring.attention import BackendContext


def triton_attention(context: BackendContext) -> AttentionBackend:
    """Make the backend of paged kernels, on a GPU or in Triton's interpreter."""
    from spec_lab.wiring.triton import require_triton

    require_triton("attention", context.device, context.dtype)
    from spec_lab.attention.triton_backend import TritonAttention

    return TritonAttention(context.page_size, context.max_positions, context.rope_write, _library(context))


def _library(context: BackendContext) -> AttendPiece | None:
    """Return the library attention for long prompts: cuDNN's kernel, which needs 16-bit types, or None."""
    import torch

    from spec_lab.attention.long_prompts import attend_by_cudnn

    is_there = context.device.type == "cuda" and torch.backends.cudnn.is_available()
    return attend_by_cudnn if is_there and context.dtype != torch.float32 else None


ROW = AttentionOption(name="triton", make=triton_attention, make_for_trees=triton_attention, needs_triton=True)
