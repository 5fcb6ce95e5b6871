"""Triton's interpreter as the tests run it: quick, and with the bits of one row and one column on any machine.

A third of its time goes to patching `triton.language` anew at each call of each function, and as much to looking for
overflow of addresses, which no tensor of a test is large enough for. A fifth of the rest makes the same shapes again.
"""

from __future__ import annotations

import dataclasses
import math
from operator import index
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sum each entry of a product input by input, as a plain loop does.

    The interpreter's own product goes to numpy's BLAS, some of whose kernels round a row by how many rows stand beside
    it. With rows of the right operand in one piece, einsum adds one of them after another to a row of sums.
    """
    assert right.shape[-1] > 1, "einsum sums a single column otherwise, and tl.dot has none"
    return np.einsum("...mk,...kn->...mn", left, right)


def _create_dot(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
) -> TensorHandle:
    assert tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar), "the interpreter has bfloat16 as integers"
    if a.dtype.scalar.is_fp8():
        a, b = (builder.create_fp_to_fp(operand, tl.float16, None) for operand in (a, b))
    left, right = (np.ascontiguousarray(operand.data, dtype=d.data.dtype) for operand in (a, b))
    return TensorHandle(multiply(left, right) + d.data, d.dtype.scalar)


class _PatchedOnce:
    """Patches the language at the first launch, and leaves it so: this process compiles no kernel."""

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._is_patched = False

    def __call__(self, _: object) -> _PatchedOnce:
        if not self._is_patched:
            self._patch(FunctionType(multiply.__code__, {"tl": tl, "core": tl.core}))
            self._is_patched = True
        return self

    def restore(self) -> None:
        """Keep what is patched."""


class _NumpyTypes:
    """Types by their names, which the interpreter looks up in a dictionary that it makes anew each time."""

    def __init__(self) -> None:
        self._find = interpreter._get_np_dtype
        self._found: dict[str, np.dtype[Any]] = {}

    def __call__(self, dtype: tl.dtype) -> np.dtype[Any]:
        scalar = dtype.scalar
        if scalar.name not in self._found:
            self._found[scalar.name] = self._find(scalar)
        return self._found[scalar.name]


_SHAPES: dict[tuple[int, ...], tuple[tl.constexpr, tl.tuple]] = {}
"""What the interpreter makes of a shape for each value: its size, and its constants."""


def _make_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _SHAPES:
        _SHAPES[shape] = tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
    self.numel, self.shape = _SHAPES[shape]


_BLOCKS: dict[tuple[str, tuple[int, ...]], tuple[tl.tuple, int, str]] = {}
"""Shape, size and name of a block by the name of its elements' type and by its shape."""


def _make_block(self: tl.block_type, element_ty: tl.dtype, shape: Any, make: Any = tl.block_type.__init__) -> None:
    key = element_ty.name, tuple(map(index, shape))
    if key not in _BLOCKS:
        make(self, element_ty, shape)
        _BLOCKS[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _BLOCKS[key]


def _broadcast(
    self: TritonSemantic, left: tl.tensor, right: tl.tensor, make: Any = TritonSemantic.broadcast_impl_value
) -> tuple[tl.tensor, tl.tensor]:
    """Give both the sizes of both. The interpreter compares each size three times, as constants of its own."""
    are_blocks = left.type.is_block(), right.type.is_block()
    if are_blocks == (False, False):
        return left, right
    if are_blocks == (True, True):
        shapes = left.type.shape.values, right.type.shape.values
        if shapes[0] == shapes[1]:
            return left, right
        if len(shapes[0]) == len(shapes[1]) and all(
            1 in pair or len(set(pair)) == 1 for pair in zip(*shapes, strict=True)
        ):
            sizes = list(map(max, *shapes))
            return _of_sizes(self, left, sizes), _of_sizes(self, right, sizes)
    pair: tuple[tl.tensor, tl.tensor] = make(self, left, right)
    return pair


def _of_sizes(self: TritonSemantic, block: tl.tensor, sizes: list[int]) -> tl.tensor:
    if block.type.shape.values == sizes:
        return block
    return self.tensor(self.builder.create_broadcast(block.handle, sizes), tl.block_type(block.type.scalar, sizes))


def _is_same_type(self: tl.dtype, other: object, compare: Any = tl.dtype.__eq__) -> bool:
    return self is other or compare(self, other)


def _patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Have a function of the language called with the interpreter's meaning of it, straight away."""
    function = member.__wrapped__ if tl.core.is_builtin(member) and hasattr(member, "__wrapped__") else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **named)

    scope.set_attr(obj, name, call)


def install() -> None:
    """Have every kernel of this process run so, if it is interpreted."""
    InterpreterBuilder.create_dot = _create_dot
    tl.tensor.__init__ = _make_tensor
    tl.block_type.__init__ = _make_block
    tl.dtype.__eq__ = _is_same_type
    TritonSemantic.broadcast_impl_value = _broadcast
    interpreter._patch_attr = _patch_attribute
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _PatchedOnce()
    interpreter._get_np_dtype = _NumpyTypes()
