"""Early launches: a kernel starts before the previous one has ended (programmatic dependent launch, sm_90 and later).

The programs of such a kernel start while the previous kernel still runs. So its launch overhead has passed when its
inputs are ready. Before it reads or writes data of other early kernels, it waits until the previous kernel has ended
and its results are visible. The previous kernel did the same, so no earlier kernel is still running either.

Before the wait a kernel may read weights and the inputs of a forward: lengths, slots and angles. Kernels that are not
early write these inputs. In every layer the kernels that read them come after a kernel that is not early, or after a
product that waits before it lets the next one start. The inputs are read past L1 (`.cg`), which may still hold those of
an earlier forward.

Not every kernel becomes faster (docs/log/families.md). If a kernel starts while others occupy multiprocessors, its
programs are distributed unevenly: two on some, none on others. So a kernel that reads much takes longer. Therefore most
kernels that start early have few programs, or load their part of a weight while they wait.

A kernel lets the next one start only after its own wait. Otherwise waiting kernels would take the room of earlier ones.
The exceptions are kernels followed by one that has weights to load: norms, rotations and merges, latent attention and
the products around it. These let the next kernel start before their own wait.
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


_AHEAD: ContextVar[bool] = ContextVar("early launches", default=False)


@contextmanager
def early_launches() -> Iterator[None]:
    """Let kernels launched inside start early, if the GPU supports it."""
    token = _AHEAD.set(INTERPRETED or can_be_early())
    try:
        yield
    finally:
        _AHEAD.reset(token)


def loads_ahead() -> bool:
    """Return whether kernels load weights before they wait.

    They do so inside `early_launches`, since no kernel of a forward writes weights.
    """
    return _AHEAD.get()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Wait for the previous kernel, then let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_behind_others(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, then wait for the previous one. This is for a next kernel that has weights to load."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def placed(early: bool) -> dict[str, bool]:
    """Return the launch options of a kernel that waits for its inputs; `early` tells whether it starts early itself."""
    if INTERPRETED or not _AHEAD.get():
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": True}


def placed_if_few(num_programs: int, most: int = _FEW_PROGRAMS) -> dict[str, bool]:
    """Return the launch options of a kernel that starts early if it has at most `most` programs."""
    return placed(num_programs <= most)


@cache
def can_be_early() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _HOPPER
