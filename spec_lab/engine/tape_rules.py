"""The rules of the tape: what it refuses. A CUDA capture would refuse or freeze most of that.

The error names the operator, the place in the source, and the remedy.
"""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType
from typing import Any

import torch

from spec_lab.engine.capture import CaptureError, is_torch_file
from spec_lab.engine.torch_internals import schema_of

_HOST_READ = "it reads a device value on the host; keep the value in a tensor (torch.where, index_select, clamp)"
_HOST_WRITE = (
    "it copies Python values to the device; make the tensor once, before the capture, or use torch.full or torch.arange"
)
_DYNAMIC_SHAPE = (
    "the shape of its result depends on values; keep the full shape and select with torch.where or masked_fill"
)
_RANDOM = "it advances a random generator; use counter-based noise (spec_kernels/noise_reference.py)"
_NEW_SHAPE = "it changes the shape of a recorded tensor itself; use the form that returns a new view"
_NEW_MEMORY = "it points a tensor at other memory; use copy_, or, around a Triton launch, a torch.library.custom_op"
_ADDRESS = "a kernel launched on an address is not seen; wrap the launch in a torch.library.custom_op"
_OTHER_DEVICE = "it copies between devices; keep every tensor of the round on one device"

_aten = torch.ops.aten
UPLOADS = {_aten.lift_fresh.default, _aten.lift.default, _aten.lift_fresh_copy.default}
ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
HOST_READS = ("tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")
"""Tensor methods that read values to the host."""
_SET_MEMORY = {getattr(_aten.set_, name) for name in _aten.set_.overloads()}
_RECORDERS = {__name__, "spec_lab.engine.tape", "spec_lab.engine.torch_internals"}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}

_CALLS: dict[Any, tuple[str, str]] = {
    **{getattr(torch.Tensor, name): (f"Tensor.{name}", _HOST_READ) for name in HOST_READS},
    **{
        getattr(torch.Tensor, name): (f"Tensor.{name}", _HOST_READ)
        for name in ("__repr__", "__format__", "__contains__")
    },
    torch.Tensor.new_tensor: ("Tensor.new_tensor", _HOST_WRITE),
    torch.Tensor.pin_memory: ("Tensor.pin_memory", _HOST_WRITE),
    torch.tensor: ("torch.tensor", _HOST_WRITE),
    torch.from_numpy: ("torch.from_numpy", _HOST_WRITE),
    torch.frombuffer: ("torch.frombuffer", _HOST_WRITE),
    torch.Tensor.data.__set__: ("Tensor.data = ...", _NEW_MEMORY),  # type: ignore[attr-defined]
    torch.Tensor.data_ptr: ("Tensor.data_ptr", _ADDRESS),
}
_CONVERSIONS = {torch.as_tensor: "torch.as_tensor", torch.asarray: "torch.asarray"}


def check_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a forbidden call that the dispatcher does not see."""
    if func in _CALLS:
        refuse(*_CALLS[func])
    if func in _CONVERSIONS and not isinstance(args[0], torch.Tensor):
        refuse(_CONVERSIONS[func], _HOST_WRITE)
    if func is torch.Tensor.to and "cpu" in [
        value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)
    ]:
        refuse('Tensor.to("cpu")', _HOST_READ)


def check_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an operator that a replay could not reproduce."""
    reason = _reason_against(func, _bound(func, args, kwargs))
    if reason is not None:
        refuse(str(func), reason)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that `func` declares to write."""
    if not schema_of(func).is_mutable:
        return []
    bound = _bound(func, args, kwargs)
    written = [a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    return [bound[name] for name in written if bound.get(name) is not None]


def refuse(operator: str, reason: str) -> None:
    """Raise CaptureError for this operator."""
    raise CaptureError(f"{operator} cannot be captured{_place()}: {reason}")


def _reason_against(func: Any, bound: dict[str, Any]) -> str | None:
    tags = func.tags
    if func in UPLOADS:
        return _HOST_WRITE
    if func in _INDEXING:
        masks = [i for i in bound["indices"] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return _DYNAMIC_SHAPE if masks else None
    if torch.Tag.data_dependent_output in tags:
        return _HOST_READ
    if torch.Tag.dynamic_output_shape in tags and bound.get("output_size") is None:
        return _DYNAMIC_SHAPE
    # Attention and dropout have this tag because of dropout; with dropout_p=0 they draw no random numbers.
    if torch.Tag.nondeterministic_seeded in tags and bound.get("dropout_p", 1.0) != 0:
        return _RANDOM
    if torch.Tag.inplace_view in tags:
        return _NEW_MEMORY if func in _SET_MEMORY else _NEW_SHAPE
    devices = {value.device.type for value in bound.values() if isinstance(value, torch.Tensor) and value.dim() > 0}
    target = bound.get("device")
    if devices and target is not None and torch.device(target).type not in devices:
        return _OTHER_DEVICE
    return _OTHER_DEVICE if len(devices) > 1 else None


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults included."""
    names, defaults = _declared(func)
    return defaults | dict(zip(names, args, strict=False)) | kwargs


@cache
def _declared(func: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the names of all arguments, and the default values of those that have one."""
    arguments = schema_of(func).arguments
    return [a.name for a in arguments], {a.name: a.default_value for a in arguments if a.has_default_value()}


def _place() -> str:
    """Return file and line of the innermost caller that is neither torch nor the tape."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_torch_file(path) and frame.f_globals.get("__name__") not in _RECORDERS:
            return f" at {path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
