"""The data that an attention backend is made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.layer_protocols import RopeWrite


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The sizes and the device that an attention backend is made from.

    Attributes:
        torch_attention: the class of attention=torch. Some sets of kernels bring a class of their own.
    """

    page_size: int
    max_positions: int
    device: torch.device
    dtype: torch.dtype
    rope_write: RopeWrite | None = None
    torch_attention: type[TorchAttention] = TorchAttention
