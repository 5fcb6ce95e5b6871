"""The shared parts of the kernels over the vocabulary: the tiles of a row of logits, and the merging of their results.

A row is divided into tiles of a fixed size, with one program each, so that even one request keeps several
multiprocessors busy. A second kernel merges the tiles in a fixed order, so a row's result does not depend on other
rows. Ties go to the lowest token id.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

VOCAB_TILE = 4096
RACE_TILE = 1024
"""A race hashes and takes float64 logarithms for every token, so its tiles are smaller."""

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def load_logits(row_ptr: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Load logits as float32, with -inf past the vocabulary."""
    return tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def nan_as_largest(logits: tl.tensor) -> tl.tensor:
    """Replace NaN by the largest value, as `torch.argmax` treats it. `tl.max` would ignore NaN, and a tile of NaN alone
    would have no argmax."""
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit
def lowest_top(values: tl.tensor, ids: tl.tensor, AXIS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the maximum along AXIS and the lowest of the `ids` that have it."""
    top = tl.max(values, AXIS, keep_dims=True)
    return tl.max(values, AXIS), tl.min(tl.where(values == top, ids, NO_TOKEN), AXIS)


@triton.jit
def finite_or_zero(maxima: tl.tensor) -> tl.tensor:
    """Return the maxima to subtract before an exponential, with -inf replaced by 0, since -inf - -inf is NaN."""
    return tl.where(maxima == float("-inf"), 0.0, maxima)


@triton.jit
def scaled_by(logits: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Divide with correct rounding, as torch does on a CPU; Triton's `/` is approximate."""
    return tl.div_rn(logits, tl.full(logits.shape, temperature, tl.float32))


@triton.jit
def probability(logits: tl.tensor, top: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the probabilities of a tile of logits. `top` and `total` are those of their row, or one for each logit."""
    return tl.div_rn(tl.exp(logits - finite_or_zero(top)), tl.zeros(logits.shape, tl.float32) + total)


@triton.jit
def merge_sums(sums: tl.tensor, maxima: tl.tensor, top: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Merge sums of exp(x - own maximum) into one sum of exp(x - top); `top` broadcasts.

    Each product is rounded before it is added. Otherwise the compiler would leave one product of each thread unrounded
    (a fused multiply-add). Several threads compute the same sum. Each would leave another product unrounded, so their
    results would differ in the last bits.
    """
    rounded = tl.fma(sums, tl.exp(maxima - finite_or_zero(top)), tl.zeros(sums.shape, tl.float32))
    return tl.sum(rounded, AXIS)


@triton.jit
def add_sums(sums: tl.tensor, maxima: tl.tensor, others: tl.tensor, other_maxima: tl.tensor) -> tl.tensor:
    """Add two tiles of sums of exp(x - own maximum), entry by entry. The result has sums of exp(x - the larger of both
    maxima)."""
    top = finite_or_zero(tl.maximum(maxima, other_maxima))
    return sums * tl.exp(maxima - top) + others * tl.exp(other_maxima - top)


def num_tiles_of(vocab_size: int, tile: int) -> int:
    return -(-vocab_size // tile)
