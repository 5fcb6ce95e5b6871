"""Launching a kernel before the one in front of it has ended (programmatic dependent launch, NVIDIA sm_90 and later).

The programs of such a kernel are placed as soon as all programs in front of it run, so that what a launch costs is over
by the time its inputs are there; meanwhile they may ask for what no kernel writes: weights. Each waits, before it reads
or writes anything else, until the kernel in front has ended and its results can be read; that one did the same, so that
nothing of any earlier kernel is under way either.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY: dict[str, bool] = {"EARLY": False}
"""Holds the options of a launch whose kernel calls `wait_for_inputs` first.

With {"EARLY": True, "launch_pdl": True} it is placed early, which no GPU has run yet.
"""


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Let the next kernel be placed, and wait for the one in front."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ask_for(source: tl.tensor, NUM_BYTES: tl.constexpr) -> None:
    """Ask for NUM_BYTES behind each of these addresses, which then come to L2: of weights, since nobody has waited yet.

    The addresses are multiples of 16, and so is NUM_BYTES.
    """
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [source.to(tl.int64), tl.full(source.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
