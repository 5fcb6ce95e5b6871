"""The private methods and attributes of torch that the tape and the launch counter use.

Other files name private operators. Because of all these, pyproject.toml sets an upper bound on torch's version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COMPOSITE = "CompositeImplicitAutograd"
"""The dispatch key of composite operators, which only call other operators."""


class OperatorMode(TorchDispatchMode):
    """A dispatch mode of this project: a subclass sees every operator in `__torch_dispatch__`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Torch asks each mode, and the default would import the whole compiler, which takes seconds."""
        return False


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operator is composite: a dispatch mode can see the operators that it calls instead."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE))


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operators that a composite one consists of, so that the active mode sees each.

    The public `decompose` is not a substitute: it uses a decomposition in Python if some import has registered one.
    """
    return func._op_dk(getattr(torch._C.DispatchKey, COMPOSITE), *args, **kwargs)


def schema_of(func: Any) -> Any:
    """Return an operator's schema: its arguments, their types, and which of them it writes."""
    return func._schema


def without_python_frame(func: Any) -> Callable[..., Any]:
    """Return the operator as a C++ callable, without the cost of a Python frame. A replay calls hundreds of them."""
    call: Callable[..., Any] = func._op
    return call


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that all views of the same memory share. It is not the address, which is 0 for empty tensors.

    Opaque tensors (oneDNN's) have no storage, so each gets a number of its own.
    """
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
