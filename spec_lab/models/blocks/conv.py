"""DFlash2's causal convolutions within a block, around both halves of a layer (z-lab; speculators' `dflash2`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.block_config import ConvSizes
from spec_lab.core.passes import Pass
from spec_lab.models.layers import AddPart, AddThenNorm, DecoderLayer, Mixer
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.norms import RowsPart


@dataclass(frozen=True, slots=True)
class BlockConv:
    """Mixes each row with earlier rows of its block, before and after a half of a layer.

    Attributes:
        base: [2, taps, hidden_size] fixed kernels for before and after, to which each row's own are added.
        kernels: makes each row's own kernels, [rows, 2 * taps * groups], from the input of the half.
    """

    base: torch.Tensor
    kernels: Linear
    block_size: int
    group_size: int

    def kernels_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the kernels [2, rows, taps, hidden_size] of `rows` [rows, hidden_size]."""
        _, num_taps, hidden_size = self.base.shape
        own = self.kernels(rows).view(rows.shape[0], 2, num_taps, -1, 1)
        wide = own.expand(-1, -1, -1, -1, self.group_size).reshape(rows.shape[0], 2, num_taps, hidden_size)
        return (self.base + wide).transpose(0, 1)

    def mixed(self, rows: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Convolve the rows [rows, hidden_size] of each block, zero-padded, with kernels [rows, taps, hidden_size]."""
        blocks, weights = rows.view(-1, self.block_size, rows.shape[1]), kernel.unflatten(0, (-1, self.block_size))
        out = blocks * weights[:, :, 0]
        for tap in range(1, kernel.shape[1]):
            earlier = F.pad(blocks[:, :-tap], (0, 0, tap, 0))
            out = out + earlier * weights[:, :, tap]
        return out.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ConvAttention:
    """A layer's attention and output product, between two convolutions."""

    attention: Mixer
    o: Linear
    conv: BlockConv

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        into, out = self.conv.kernels_of(rows)
        attended = self.attention(self.conv.mixed(rows, into), at)
        return self.conv.mixed(self.o(attended), out)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        raise AssertionError("the rows of a block attend")


@dataclass(frozen=True, slots=True)
class ConvRows:
    """A layer's MLP, between two convolutions."""

    part: RowsPart
    conv: BlockConv

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        into, out = self.conv.kernels_of(rows)
        return self.conv.mixed(self.part(self.conv.mixed(rows, into)), out)


def unchanged(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows`. It replaces the output product if the mixer includes that."""
    return rows


def with_convolutions(
    layer: DecoderLayer, sizes: ConvSizes | None, block_size: int, tensors: Mapping[str, torch.Tensor], prefix: str
) -> DecoderLayer:
    """Put convolutions around both halves of a layer, from the names below `prefix`; do nothing without `sizes`."""
    if sizes is None:
        return layer

    def conv(name: str) -> BlockConv:
        base, weight = tensors[f"{prefix}{name}.base_kernel"], tensors[f"{prefix}{name}.kernel_projection.weight"]
        return BlockConv(base, make_linear(weight), block_size, sizes.group_size)

    close, finish = layer.close, layer.finish
    assert isinstance(close, AddThenNorm) and isinstance(finish, AddPart)
    return replace(
        layer,
        mixer=ConvAttention(layer.mixer, close.product, conv("attention_conv")),
        close=AddThenNorm(unchanged, close.norm),
        finish=AddPart(ConvRows(finish.part, conv("mlp_conv"))),
    )
