"""Launching a kernel before the one in front of it has ended (programmatic dependent launch, NVIDIA sm_90 and later).

The programs of such a kernel are placed while the kernel in front of it still runs, so that what a launch costs is over
by the time its inputs are there. Before one reads or writes anything that such kernels write, it waits until the kernel
in front has ended and its results can be read; that one did the same, so that nothing of any earlier kernel is under
way either.

What may be read before are weights, and what a forward is given: lengths, slots and angles. Kernels that are launched
as ever write these, and in every layer a product that waits before it lets others in, or a launch as ever, stands in
front of what reads them. They are read past L1 (`.cg`), where an earlier forward's may still lie.

Not every kernel gains by it (docs/log/families.md). One that is placed while others hold multiprocessors comes to lie
two deep on some and not at all on others, so that reading much takes longer: few programs are placed early, or those
that load their part of a weight meanwhile. And the next kernel is let in behind the wait, since else kernels gather
that take the room of those in front. Where what comes behind has weights to load, it is let in before: by norms,
rotations and merges, and by latent attention and the products around it.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_kernels.utils import INTERPRETED

_HOPPER = (9, 0)
_FEW_PROGRAMS = 64


_AHEAD: ContextVar[bool | None] = ContextVar("early launches", default=None)
"""None where nobody has said anything."""


@contextmanager
def early_launches() -> Iterator[None]:
    """Place kernels early that are launched inside, one behind the other, where the GPU can and nobody forbids it."""
    with _launched(_AHEAD.get() is not False and (INTERPRETED or can_be_early())):
        yield


@contextmanager
def launched_plainly() -> Iterator[None]:
    """Let no kernel inside be placed early: not every way to launch one is known to work in an IF node of a graph."""
    with _launched(False):
        yield


@contextmanager
def _launched(ahead: bool) -> Iterator[None]:
    token = _AHEAD.set(ahead)
    try:
        yield
    finally:
        _AHEAD.reset(token)


def loads_ahead() -> bool:
    """Tell whether weights may be loaded before a kernel waits: nothing has written to them for long."""
    return bool(_AHEAD.get())


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Wait for the kernel in front, and let the next one be placed."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_behind_others(EARLY: tl.constexpr) -> None:
    """Let the next kernel be placed, and wait for the one in front: what is next has weights to load."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def placed(early: bool) -> dict[str, bool]:
    """Return the options of a launch whose kernel waits: placed early itself, or not."""
    if INTERPRETED or not _AHEAD.get():
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": True}


def placed_if_few(num_programs: int, most: int = _FEW_PROGRAMS) -> dict[str, bool]:
    """Return them where few programs are placed early, `most` or less."""
    return placed(num_programs <= most)


@cache
def can_be_early() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _HOPPER
