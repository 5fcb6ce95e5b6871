"""The operators of kernels=native, and the parts of a model as they take them: weights packed, sizes beside them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from spec_kernels.native.build import build
from spec_kernels.native.packing import pack
from spec_kernels.operators import cpu_operator


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


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "signed_sin", "positions", "slots", "pages", "lengths")),
        *((name, ctypes.c_int64) for name in ("rotary_stride", "num_pages", "num_queries")),
    )


class NativeProduct:
    """Is a weight as the kernels read it, in panels of 64 outputs: in bfloat16 where that is what it holds anyway.

    Attributes:
        address: of its description, which operators take.
    """

    __slots__ = ("_bias", "_panels", "address", "described", "num_inputs", "num_outputs")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack a float32 weight [outputs, inputs] on the CPU."""
        self.num_outputs, self.num_inputs = weight.shape
        self._panels, layout = pack(weight, has_tiles())
        self._bias = None if bias is None else bias.float().contiguous()
        self.described = _Product(
            self._panels.data_ptr(), pointer_to(self._bias), self.num_outputs, self.num_inputs, layout
        )
        self.address = ctypes.addressof(self.described)

    @property
    def num_bytes(self) -> int:
        """Bytes of its panels."""
        return self._panels.nbytes

    def move(self, memory: torch.Tensor) -> None:
        """Lay the panels into `memory` [num_bytes], uint8."""
        moved = memory.view(self._panels.dtype).view(self._panels.shape)
        self._panels = moved.copy_(self._panels)
        self.described.panels = moved.data_ptr()


class NativeNorm:
    """Is an RMSNorm as the kernels read it; without a weight it is none.

    Attributes:
        address: of its description, which operators take.
    """

    __slots__ = ("_weight", "address", "described")

    def __init__(self, weight: torch.Tensor | None = None, eps: float = 0.0) -> None:
        self._weight = None if weight is None else weight.float().contiguous()
        self.described = NormStructure(pointer_to(self._weight), eps)
        self.address = ctypes.addressof(self.described)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Holds the parts of a decoder layer.

    Attributes:
        attention_norm: without a weight for a layer whose rows have been normed.
        head_norm: of query and key heads, a row of weight each; without a weight for heads that are not normed.
    """

    qkv: NativeProduct
    o: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    attention_norm: NativeNorm
    mlp_norm: NativeNorm
    head_norm: NativeNorm


class NativeLayer:
    """Is a decoder layer as the kernels read it.

    Attributes:
        address: of its description, which operators take.
    """

    __slots__ = ("_parts", "address", "described", "hidden_size", "num_attended", "num_projected")

    def __init__(
        self,
        parts: LayerParts,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        page_size: int,
        window: int | None = None,
    ) -> None:
        self._parts = parts
        self.hidden_size, self.num_attended = parts.o.num_outputs, parts.o.num_inputs
        self.num_projected = parts.qkv.num_outputs
        described = (getattr(parts, field.name).described for field in fields(parts))
        sizes = num_heads, num_kv_heads, head_dim, rotary_dim, window or 0, page_size
        self.described = LayerStructure(*described, scale, *sizes)
        self.address = ctypes.addressof(self.described)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(product.num_bytes for product in self._products.values())

    def move(self, memory: torch.Tensor) -> None:
        """Lay the weights into `memory` [num_bytes], uint8, in the order in which they are read."""
        parts = memory.split([product.num_bytes for product in self._products.values()])
        for (name, product), part in zip(self._products.items(), parts, strict=True):
            product.move(part)
            setattr(self.described, name, product.described)

    @property
    def _products(self) -> dict[str, NativeProduct]:
        return {name: getattr(self._parts, name) for name in ("qkv", "o", "gate_up", "down")}


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


@cpu_operator(
    "native_layer(Tensor(a!) out, Tensor(b!) kv, Tensor rows, Tensor residual, Tensor cos, Tensor signed_sin,"
    " Tensor slots, Tensor pages, Tensor lengths, Tensor? live, int num_queries, int layer) -> ()"
)
def decoder_layer(
    out: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    residual: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    live: torch.Tensor | None,
    num_queries: int,
    layer: int,
) -> None:
    """Run a whole decoder layer.

    Args:
        out: [live rows, hidden_size], written.
        kv: [cache slots, 2, num_kv_heads, head_dim], written at `slots`.
        rows: [rows, in_features], `num_queries` a request: the stream, or a norm of it where the layer has none.
        residual: [live rows, hidden_size] the stream.
        cos: of each row, [rows, ..., rotary_dim]; `signed_sin` likewise.
        slots: [rows] int64.
        pages: [requests, num_pages] int64, of the keys; positions past the last column lie in its page.
        lengths: [requests] int64, keys that the last live row of each request sees.
        live: [live rows] int64, those that attend and go on, `num_queries` a request; None is all.
        layer: `NativeLayer.address`.
    """
    place = describe_place((cos, signed_sin), slots, (pages, lengths, num_queries))
    pointers = out.data_ptr(), kv.data_ptr(), float_rows(rows), float_rows(residual), pointer_to(live)
    check(library().native_layer(layer, ctypes.addressof(place), *pointers, rows.shape[0], out.shape[0]))


@cpu_operator(
    "native_project(Tensor(a!) heads, Tensor(b!) kv, Tensor rows, Tensor cos, Tensor signed_sin, Tensor slots,"
    " int layer) -> ()"
)
def project(
    heads: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
) -> None:
    """Run the first part of a layer: up to its queries, which lie in `heads` [rows, all heads * head_dim]."""
    place = describe_place((cos, signed_sin), slots, None)
    pointers = heads.data_ptr(), kv.data_ptr(), float_rows(rows)
    check(library().native_project(layer, ctypes.addressof(place), *pointers, rows.shape[0]))


@cpu_operator(
    "native_attend(Tensor(a!) out, Tensor kv, Tensor queries, Tensor pages, Tensor lengths, int num_queries,"
    " int layer) -> ()"
)
def attend(
    out: torch.Tensor,
    kv: torch.Tensor,
    queries: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    num_queries: int,
    layer: int,
) -> None:
    """Run the second part: out [rows, heads * head_dim] of `queries` [rows, at least as many]."""
    assert queries.stride(1) == 1
    place = describe_place(None, None, (pages, lengths, num_queries))
    pointers = out.data_ptr(), kv.data_ptr(), queries.data_ptr()
    check(library().native_attend(layer, ctypes.addressof(place), *pointers, queries.stride(0), queries.shape[0]))


@cpu_operator("native_finish(Tensor(a!) out, Tensor attended, Tensor residual, int layer) -> ()")
def finish(out: torch.Tensor, attended: torch.Tensor, residual: torch.Tensor, layer: int) -> None:
    """Run the last part: out [rows, hidden_size] of what attention gave, and the stream in front of the layer."""
    pointers = out.data_ptr(), float_rows(attended), float_rows(residual)
    check(library().native_finish(layer, *pointers, residual.shape[0]))


@cpu_operator("native_norm(Tensor(a!) out, Tensor rows, int norm) -> ()")
def rms_norm(out: torch.Tensor, rows: torch.Tensor, norm: int) -> None:
    """Norm rows; `norm` is `NativeNorm.address`."""
    library().native_norm(norm, out.data_ptr(), float_rows(rows), rows.shape[1], rows.shape[0])


@cpu_operator("native_product(Tensor(a!) out, Tensor rows, int product) -> ()")
def multiply(out: torch.Tensor, rows: torch.Tensor, product: int) -> None:
    """Multiply rows by a weight; `product` is `NativeProduct.address`."""
    check(library().native_product(product, out.data_ptr(), float_rows(rows), rows.shape[0]))


@cpu_operator("native_likeliest(Tensor(a!) tokens, Tensor rows, Tensor? token_map, int norm, int head) -> ()")
def likeliest(tokens: torch.Tensor, rows: torch.Tensor, token_map: torch.Tensor | None, norm: int, head: int) -> None:
    """Write the likeliest token of each row, the lowest id of equal ones: of `head`'s product with the normed rows."""
    pointers = pointer_to(token_map), tokens.data_ptr(), float_rows(rows)
    check(library().native_likeliest(head, norm, *pointers, rows.shape[0]))


@cpu_operator(
    "native_draft_input(Tensor(a!) out, Tensor tokens, Tensor hidden, Tensor embedding, int embedding_norm,"
    " int hidden_norm) -> ()"
)
def draft_input(
    out: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    embedding: torch.Tensor,
    embedding_norm: int,
    hidden_norm: int,
) -> None:
    """Write the normed embeddings of tokens and, beside them, normed hidden states: out [rows, 2 * hidden_size]."""
    assert tokens.is_contiguous() and embedding.is_contiguous()
    num_rows, size = hidden.shape
    pointers = out.data_ptr(), tokens.data_ptr(), float_rows(hidden)
    library().native_draft_input(embedding_norm, hidden_norm, float_rows(embedding), size, *pointers, num_rows)


@cpu_operator(
    "native_build(Tensor(a!) positions, Tensor(b!) slots, Tensor(c!) lengths, Tensor wanted, Tensor keys,"
    " Tensor pages, int page_size, int num_positions) -> ()"
)
def build_metadata(
    positions: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    wanted: torch.Tensor,
    keys: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    num_positions: int,
) -> None:
    """Write the metadata of rows at `wanted` [requests, num_queries] positions, of which the last sees `keys`
    [requests]: positions clamped into the cache and `slots`, both [requests * num_queries], and `lengths`, 1 or more.
    `pages` is [requests, num_pages], the last column scratch.
    """
    check_places(positions, slots, lengths, wanted, keys, pages)
    pointers = (tensor.data_ptr() for tensor in (positions, slots, lengths, wanted, keys, pages))
    library().native_build(*pointers, *wanted.shape, pages.shape[1], page_size, num_positions)


@cpu_operator(
    "native_advance(Tensor(a!) positions, Tensor(b!) slots, Tensor(c!) lengths, Tensor pages, int page_size,"
    " int num_positions) -> ()"
)
def advance_metadata(
    positions: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    num_positions: int,
) -> None:
    """Move the metadata of one row a request one position on, in place."""
    check_places(positions, slots, lengths, pages)
    pointers = (tensor.data_ptr() for tensor in (positions, slots, lengths, pages))
    library().native_advance(*pointers, *pages.shape, page_size, num_positions)
