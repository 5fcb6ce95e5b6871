"""The parts of kernels that write and read keys and values in e4m3; `narrow_kv_reference` describes them."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(exponents: tl.tensor) -> tl.tensor:
    """Return 2^exponents in float32, exactly."""
    return ((exponents.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponents_of(largest: tl.tensor) -> tl.tensor:
    """Return the exponents of rows from their largest absolute numbers, in float32."""
    return tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 135, -100)


@triton.jit
def narrowed(rows: tl.tensor, exponents: tl.tensor) -> tl.tensor:
    """Divide rows by 2^exponents [rows], and round them to e4m3's numbers, which are float32 still.

    The rounding is spelt out, so that the cast behind it is exact: Triton 3.7's interpreter drops a carry into the
    exponent. Below 2^-6 numbers are multiples of 2^-9, which adding 1.5 * 2^14 rounds to.
    """
    wide = rows.to(tl.float32) * power(-exponents)[:, None]
    bits = wide.to(tl.int32, bitcast=True)
    even = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(wide) < 0.015625, wide + 24576.0 - 24576.0, even)


@triton.jit
def store_row(
    kv_ptrs: tl.tensor, exponents_ptrs: tl.tensor, rows: tl.tensor, is_entry: tl.tensor, is_row: tl.tensor
) -> None:
    """Narrow and write rows [rows, channels], whose masked numbers are 0, and their exponents."""
    exponents = exponents_of(tl.max(tl.abs(rows), 1).to(tl.float32))
    tl.store(kv_ptrs, narrowed(rows, exponents).to(kv_ptrs.dtype.element_ty), mask=is_entry)
    tl.store(exponents_ptrs, exponents.to(tl.int8), mask=is_row)


@triton.jit
def load_powers(
    exponents_ptr: tl.tensor, slots: tl.tensor, kv_head: tl.tensor, is_key: tl.tensor, NUM_KV_HEADS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load what the keys, and the values, of some cache slots are multiplied by."""
    at = exponents_ptr + slots * (2 * NUM_KV_HEADS) + kv_head
    of_keys = tl.load(at, mask=is_key, other=0)
    of_values = tl.load(at + NUM_KV_HEADS, mask=is_key, other=0)
    return power(of_keys), power(of_values)
