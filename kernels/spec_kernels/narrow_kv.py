"""The parts of kernels that write and read keys and values in e4m3; `narrow_kv_reference` describes them."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.online_softmax import weigh_keys


@triton.jit
def narrowed(rows: tl.tensor, largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Divide rows by powers of two that follow from their largest absolute numbers, and round them to e4m3's numbers.

    Returns these, which are float32 still, and the powers in bfloat16. The rounding is spelt out, so that the cast
    behind it is exact: Triton 3.7's interpreter drops a carry into the exponent. Below 2^-6 numbers are multiples of
    2^-9, which adding 1.5 * 2^14 rounds to. NaN takes that way too, since as bits it can carry into the sign and be 0.
    """
    biased = tl.maximum(((largest.to(tl.float32).to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 27)
    wide = rows.to(tl.float32) * ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None]
    bits = wide.to(tl.int32, bitcast=True)
    even = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    values = tl.where(tl.abs(wide) >= 0.015625, even, wide + 24576.0 - 24576.0)
    return values, (biased << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def store_row(
    kv_ptrs: tl.tensor, powers_ptrs: tl.tensor, rows: tl.tensor, is_entry: tl.tensor, is_row: tl.tensor
) -> None:
    """Narrow and write rows [rows, channels], whose masked numbers are 0, and their powers."""
    values, powers = narrowed(rows, tl.max(tl.abs(rows), 1))
    tl.store(kv_ptrs, values.to(kv_ptrs.dtype.element_ty), mask=is_entry)
    tl.store(powers_ptrs, powers, mask=is_row)


@triton.jit
def load_powers(
    pairs_ptr: tl.tensor, slots: tl.tensor, kv_head: tl.tensor, is_key: tl.tensor, NUM_KV_HEADS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load what the keys, and the values, of some cache slots are multiplied by: 32 bits, which the compiler fetches
    ahead as it does keys."""
    pairs = tl.load(pairs_ptr + slots * NUM_KV_HEADS + kv_head, mask=is_key, other=0)
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def weigh_narrow_keys(
    maxima: tl.tensor,
    sums: tl.tensor,
    scores: tl.tensor,
    powers: tl.tensor,
    KEY_AXIS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Do as `weigh_keys`, but multiply the weights by the powers of the keys' values.

    The products would leave float16's range: where values are small, or where one key outweighs many. There the powers
    are added to the scores as logarithms, so the largest product of a row is 1. The sums, in float32, are divided by
    them again. So maxima are those of the products, and sums are relative to them as ever.
    """
    powers = tl.expand_dims(powers, 1 - KEY_AXIS)
    if tl.float16 == DTYPE:
        exponents = powers.to(tl.int32, bitcast=True) >> 23
        scores += (exponents - 127).to(tl.float32)
        maxima, _, weights, decay = weigh_keys(maxima, sums, scores, KEY_AXIS)
        shares = weights * ((254 - exponents) << 23).to(tl.float32, bitcast=True)
        sums = tl.fma(sums, decay, tl.sum(shares, KEY_AXIS))
    else:
        maxima, sums, weights, decay = weigh_keys(maxima, sums, scores, KEY_AXIS)
        weights *= powers
    return maxima, sums, weights, decay


@triton.jit
def in_two_parts(queries: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Split queries [channels, rows] into two parts in e4m3: the queries are (first + second * ratio) * power, with
    powers of two [rows].

    Two numbers of four significant bits, with signs of their own, hold nine. So numbers in bfloat16 stay as they are,
    and those in float16 are rounded, unless they are less than 2^-13 of their row's largest: there the error is up to
    2^-22 of that. Keys need not be widened, since the tensor cores multiply numbers of 8 bits too. Of an infinite
    number e4m3 keeps 448 as the first part, and NaN as the second, so its row is NaN as in torch. Returns first,
    second, ratio and power.
    """
    rows = tl.trans(queries).to(tl.float32)
    first, bits = narrowed(rows, tl.max(tl.abs(rows), 1))
    power = bits.to(tl.float32)
    rest = rows - first * power[:, None]
    second, bits = narrowed(rest, tl.max(tl.abs(rest), 1))
    return tl.trans(first).to(DTYPE), tl.trans(second).to(DTYPE), bits.to(tl.float32) / power, power


@triton.jit
def widened_words(words: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Widen the numbers in the low and in the high bytes of words. In bfloat16 they are times 2^-120, since their bits
    are put where bfloat16 has sign, exponent and mantissa."""
    if tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, rest;
            shl.b32 sign, $2, 8;
            shl.b32 rest, $2, 4;
            and.b32 rest, rest, 0x07f007f0;
            lop3.b32 $0, sign, 0x80008000, rest, 0xea;
            shr.u32 rest, $2, 4;
            and.b32 rest, rest, 0x07f007f0;
            lop3.b32 $1, $2, 0x80008000, rest, 0xea;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        high = (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return low, high
