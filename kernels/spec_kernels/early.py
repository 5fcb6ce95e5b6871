"""Launching a kernel before the one in front of it has ended (programmatic dependent launch, NVIDIA sm_90 and later).

The programs of such a kernel are placed while the kernel in front of it still runs, so that what a launch costs is
over by the time its inputs are there. Before one reads or writes anything that kernels write, it waits until the kernel
in front has ended and its results can be read; that one did the same, so that nothing of any earlier kernel is under
way either.

A kernel lets the next one be placed when it has waited itself, and not before: else those behind it gather, four deep,
and take the room of the programs in front.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OFF, ON, UNTRIGGERED, AHEAD = range(4)
"""Ways of a launch: placed when the one in front has ended; early; early, but the next one not before this one ends;
early, and small weights, which no kernel writes, are loaded before it waits."""

EARLY: dict[str, int | bool] = {"EARLY": OFF}
"""Holds the options of a launch whose kernel calls `wait_for_inputs` first.

With {"EARLY": ON, "launch_pdl": True} it is placed early, which no GPU has run yet.
"""


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Wait for the kernel in front, and let the next one be placed."""
    if EARLY > 0:
        gdc_wait()
    if EARLY > 0 and EARLY != 2:
        gdc_launch_dependents()
