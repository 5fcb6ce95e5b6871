"""Corners of torch that have no public name are used here, for the tape and the launch counter, and nowhere else.

pyproject.toml bounds torch from above because of them and of the packed products in `models/linear.py`.
`tests/test_torch_internals.py` names each one, so that a new torch that lacks it fails there and says which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COMPOSITE = "CompositeImplicitAutograd"
"""The dispatch key of operators that are only a name for others."""


class OperatorMode(TorchDispatchMode):
    """A dispatch mode of this project: a subclass sees every operator in `__torch_dispatch__`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks each mode. Its default imports the whole compiler at the first use: seconds, for nothing."""
        return False


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operator is only a name for others, which a dispatch mode may ask to see instead."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE))


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operators behind a composite one, each of which the mode that is on sees.

    `decompose` is public, and would take a decomposition written in Python where some other import registered one.
    """
    return func._op_dk(getattr(torch._C.DispatchKey, COMPOSITE), *args, **kwargs)


def schema_of(func: Any) -> Any:
    """Return what an operator declares: its arguments, their types, and which of them it writes."""
    return func._schema


def without_python_frame(func: Any) -> Callable[..., Any]:
    """Return the same operator as a C++ callable: a replay calls hundreds of them, and Python's frame is most of a
    call."""
    call: Callable[..., Any] = func._op
    return call


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that all views of one memory share. An address would not do: it is 0 for every empty tensor.

    Opaque tensors (oneDNN's) have no storage to ask; they have a number of their own.
    """
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
