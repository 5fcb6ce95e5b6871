"""What goes with the rows of a forward: through a model, and through each of its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_lab.core.kept import ALL_ROWS, Kept
from spec_lab.core.types import AttentionMetadata


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Cos and signed sin [rows, 1, rotary_dim] of the rows of one forward, gathered once for all layers."""

    cos: torch.Tensor
    signed_sin: torch.Tensor

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate the first rotary_dim channels of [rows, num_heads, head_dim]; the others stay as they are."""
        rotary_dim = self.cos.shape[-1]
        if rotary_dim == heads.shape[-1]:
            return self._turned(heads)
        return torch.cat((self._turned(heads[..., :rotary_dim]), heads[..., rotary_dim:]), dim=-1)

    @property
    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin as kernels read them, [rows, rotary_dim]."""
        return self.cos.squeeze(1), self.signed_sin.squeeze(1)

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate all channels. Since sin is negated in its first half, swapping the halves takes one roll."""
        swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cos, swapped, self.signed_sin)


NOT_TURNED = RotaryRows(torch.empty(0, 1, 0), torch.empty(0, 1, 0))


@dataclass(slots=True)
class Pass:
    """What goes with the rows of a forward.

    Attributes:
        cache: what the rows are written to: that of all layers, or within a layer its own.
        metadata: of all rows.
        kept: the rows that go on behind the last KV write, or within a layer behind its own.
        rotary: of all rows, within a layer; `NOT_TURNED` outside.
    """

    cache: Any
    metadata: AttentionMetadata
    kept: Kept = ALL_ROWS
    rotary: RotaryRows = NOT_TURNED

    def of_queries(self) -> Pass:
        """Return the pass of the rows that attend."""
        cos, metadata = self.kept.queries(self.rotary.cos, self.metadata)
        signed_sin, _ = self.kept.queries(self.rotary.signed_sin, self.metadata)
        return replace(self, metadata=metadata, rotary=RotaryRows(cos, signed_sin))
