"""The parts of a model as kernels=native reads them: packed weights and their sizes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

import torch

from spec_kernels.native.compiled import has_tiles, pointer_to
from spec_kernels.native.packing import Layout, pack, unpack


class _Product(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs", "layout")),
    )


class NormStructure(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class LayerStructure(ctypes.Structure):
    _fields_ = (
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
        *((name, NormStructure) for name in ("attention_norm", "mlp_norm", "head_norm")),
        ("scale", ctypes.c_float),
        *(
            (name, ctypes.c_int64)
            for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "window", "page_size")
        ),
    )


class NativeProduct:
    """A weight as the C code reads it, in panels of 64 outputs; in bfloat16 if that represents it exactly.

    Attributes:
        address: the address of its description, which operators take.
    """

    __slots__ = ("_layout", "_panels", "address", "bias", "described", "num_inputs", "num_outputs")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack a float32 weight [outputs, inputs] on the CPU."""
        self.num_outputs, self.num_inputs = weight.shape
        self._panels, self._layout = pack(weight, has_tiles())
        self.bias = None if bias is None else bias.float().contiguous()
        self.described = _Product(
            self._panels.data_ptr(), pointer_to(self.bias), self.num_outputs, self.num_inputs, self._layout
        )
        self.address = ctypes.addressof(self.described)

    @property
    def num_bytes(self) -> int:
        """The size of its panels in bytes."""
        return self._panels.nbytes

    def dense_weight(self) -> torch.Tensor:
        """Unpack the weight to float32."""
        return unpack(self._panels, Layout(self._layout), self.num_outputs, self.num_inputs)

    def move(self, memory: torch.Tensor) -> None:
        """Move the panels into `memory` [num_bytes], uint8."""
        moved = memory.view(self._panels.dtype).view(self._panels.shape)
        self._panels = moved.copy_(self._panels)
        self.described.panels = moved.data_ptr()


class NativeNorm:
    """An RMSNorm as the C code reads it. Without a weight it means that there is no norm.

    Attributes:
        address: the address of its description, which operators take.
    """

    __slots__ = ("_weight", "address", "described")

    def __init__(self, weight: torch.Tensor | None = None, eps: float = 0.0) -> None:
        self._weight = None if weight is None else weight.float().contiguous()
        self.described = NormStructure(pointer_to(self._weight), eps)
        self.address = ctypes.addressof(self.described)


@dataclass(frozen=True, slots=True)
class NativeLayerParts:
    """The parts of a decoder layer.

    Attributes:
        attention_norm: the norm before attention; it has no weight if rows are already normed.
        head_norm: the norm of query and key heads, with a row of weights for each head; it has no weight if heads are
            not normed.
    """

    qkv: NativeProduct
    o: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    attention_norm: NativeNorm
    mlp_norm: NativeNorm
    head_norm: NativeNorm


class NativeLayer:
    """A decoder layer as the C code reads it.

    Attributes:
        address: the address of its description, which operators take.
    """

    __slots__ = ("_parts", "address", "described")

    def __init__(
        self,
        parts: NativeLayerParts,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        page_size: int,
        window: int | None = None,
    ) -> None:
        self._parts = parts
        described = (getattr(parts, field.name).described for field in fields(parts))
        self.described = LayerStructure(
            *described, scale, num_heads, num_kv_heads, head_dim, rotary_dim, window or 0, page_size
        )
        self.address = ctypes.addressof(self.described)

    @property
    def num_bytes(self) -> int:
        """The size of its products' panels in bytes."""
        return sum(product.num_bytes for product in self._products.values())

    def move(self, memory: torch.Tensor) -> None:
        """Move the panels into `memory` [num_bytes], uint8, in the order in which they are read."""
        parts = memory.split([product.num_bytes for product in self._products.values()])
        for (name, product), part in zip(self._products.items(), parts, strict=True):
            product.move(part)
            setattr(self.described, name, product.described)

    @property
    def _products(self) -> dict[str, NativeProduct]:
        return {name: getattr(self._parts, name) for name in ("qkv", "o", "gate_up", "down")}
