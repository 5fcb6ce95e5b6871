"""A dot for Triton's interpreter whose bits are those of one row and one column, on any machine.

The interpreter's own goes to numpy's BLAS. Some of its kernels round a row by how many rows stand beside it, so that
a test of a kernel's bits would be one of the machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sum each entry of a product input by input, as a plain loop does.

    With rows of the right operand in one piece, einsum adds one of them after another to a row of sums.
    """
    assert right.shape[-1] > 1, "einsum sums a single column otherwise, and tl.dot has none"
    return np.einsum("...mk,...kn->...mn", left, right)


def _create_dot(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
) -> TensorHandle:
    assert a.data.dtype.kind == b.data.dtype.kind == "f", "the interpreter has bfloat16 and fp8 as integers"
    left, right = (np.ascontiguousarray(operand.data, dtype=d.data.dtype) for operand in (a, b))
    return TensorHandle(multiply(left, right) + d.data, d.dtype.scalar)


def install() -> None:
    """Have every kernel of this process multiply so, if it is interpreted."""
    InterpreterBuilder.create_dot = _create_dot
