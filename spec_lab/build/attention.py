"""What an attention backend is made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.config.run import Run
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.core.layer_protocols import RopeWrite


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What `build` of an attention option gets: the run, and the sizes and types that its device settles.

    Attributes:
        max_positions: the most positions that a sequence may have, with those that a round writes past its end.
    """

    run: Run
    max_positions: int
    device: torch.device
    dtype: torch.dtype
    kernels: KernelSet

    @property
    def rope_write(self) -> RopeWrite | None:
        """Return the kernel that rotates heads and writes KV; None if torch and the backend do."""
        return self.kernels.get(Op.ROPE_WRITE, None)
