"""Tells what is captured into an IF node of a CUDA graph: not every way to launch a kernel is known to work there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_INSIDE = ContextVar("inside an IF node", default=False)


@contextmanager
def inside_if_node() -> Iterator[None]:
    """Mark the block as what is captured into an IF node."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def is_inside_if_node() -> bool:
    """Tell whether what is launched now is captured into an IF node."""
    return _INSIDE.get()
