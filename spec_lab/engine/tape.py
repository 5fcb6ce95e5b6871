"""The tape: records and replays operators on a CPU with the semantics of a CUDA graph, so that CI runs every graph
mode.

Each operator is recorded once, with its arguments. In a replay Python values stay frozen, and results are written to
the recorded tensors. Views are not recreated, since their memory does not move. `make_fx` is not a substitute: it
silently freezes `.item()`, and keeps no addresses.

A function that the tape accepts can still fail in a real capture, for instance if a library call synchronises. Most of
what the tape refuses would fail or be frozen in a real capture. It also refuses two things that a real capture
takes: draws from a random generator, and launches on an address, which the tape does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic

import torch
from torch.overrides import TorchFunctionMode

from spec_lab.core.trees import tensors_in
from spec_lab.engine.capture import Result
from spec_lab.engine.tape_rules import (
    ALLOCATIONS,
    UPLOADS,
    check_call,
    check_operator,
    refuse,
    written_arguments,
)
from spec_lab.engine.torch_internals import (
    OperatorMode,
    is_composite,
    run_composite,
    schema_of,
    storage_id,
    without_python_frame,
)

Step = Callable[[], object]

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}
# Options of a factory function. Its out= form takes them from the tensor.
_FACTORY_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}


@dataclass(slots=True)
class TapeGraph(Generic[Result]):
    """A recorded tape, replayed like a CUDA graph.

    Attributes:
        inputs: the tensors that existed before the capture and that it reads or writes, one for each storage, in order
            of use.
        results: the tensors that the capture made and a replay rewrites, one for each storage: outputs and temporaries.
    """

    outputs: Result
    inputs: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    _steps: list[Step]

    @property
    def num_nodes(self) -> int:
        return len(self._steps)

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self._steps:
                step()

    def uses(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in the memory of one of `inputs`. So the answer is False for a tensor that was
        put in the place of a recorded one, and for results of this graph."""
        return any(storage_id(tensor) == storage_id(known) for known in self.inputs)


class TapeRecorder:
    """Records a function by executing it, then undoes the effects: it restores buffers and poisons results."""

    num_copies = 1

    def __init__(self, num_warmups: int = 1) -> None:
        """Set the number of warm-ups. As on a GPU, a warm-up computes the values that a function caches outside the
        tape."""
        self._num_warmups = num_warmups

    def capture(self, function: Callable[[], Result]) -> TapeGraph[Result]:
        with torch.inference_mode():
            for _ in range(self._num_warmups):
                function()
            tape = Tape()
            try:
                with _HostAccess(tape), tape:
                    outputs = function()
            finally:
                tape.restore_inputs()
            tape.poison_results()
        return TapeGraph(outputs, tuple(tape.inputs.values()), tuple(tape.results.values()), tape.steps)


class Tape(OperatorMode):
    """Records every operator that computes or writes.

    Attributes:
        steps: the functions that a replay calls, in order.
        inputs: by storage, the first tensor seen of those that existed before.
        results: by storage, the newest tensor of those that were made.
        is_assigning: whether a `tensor[...] = value` is running. If the value is a number, torch makes a tensor of it
            on a CPU, but not on a GPU. So this upload is not refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.inputs: dict[int, torch.Tensor] = {}
        self.is_assigning = False
        self.results: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:  # recorded part by part: a host read inside is seen, and views cost nothing
                return run_composite(func, args, kwargs)
        if func in UPLOADS and self.is_assigning and args[0].dim() == 0:
            self._numbers[storage_id(args[0])] = args[0]
            return args[0]
        check_operator(func, args, kwargs)
        known = self._know_inputs(func, args, kwargs)
        result = func(*args, **kwargs)
        self._append(func, args, kwargs, result, known)
        return result

    def restore_inputs(self) -> None:
        """Undo the recording's changes to tensors that existed before it."""
        for key, before in self._before.items():
            _bytes_of(self.inputs[key]).copy_(before)

    def poison_results(self) -> None:
        """Fill all results with poison, so that reading one before it is written is noticed."""
        for tensor in self.results.values():
            poison(tensor)

    def _know_inputs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Register new inputs, save contents that are about to be overwritten, and return the storages of all
        arguments."""
        known = set()
        for tensor in tensors_in((args, kwargs)):
            key = storage_id(tensor)
            known.add(key)
            if key not in self.results and key not in self._numbers:
                self.inputs.setdefault(key, tensor)
        for tensor in tensors_in(written_arguments(func, args, kwargs)):
            key = storage_id(tensor)
            if key in self.inputs and key not in self._before:
                self._before[key] = _bytes_of(tensor).clone()
        return known

    def _append(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, known: set[int]) -> None:
        fresh = [tensor if storage_id(tensor) not in known else None for tensor in tensors_in(result)]
        for tensor in fresh:
            if tensor is not None:
                if tensor.layout is not torch.strided:
                    refuse(str(func), "its result has no plain memory to rewrite; make it before the capture")
                self.results[storage_id(tensor)] = tensor
        if func in ALLOCATIONS or (not schema_of(func).is_mutable and not any(t is not None for t in fresh)):
            return  # no work, a view, or a value for the host that depends on shapes only
        self.steps.append(_make_step(func, args, kwargs, fresh))


class _HostAccess(TorchFunctionMode):
    """Refuses host accesses that bypass the dispatcher: .tolist(), .numpy(), .cpu(), torch.tensor(...), ...

    It is off inside every call that it sees, so the body of a custom operator is not checked.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_call(func, args, kwargs)
        self._tape.is_assigning = func is torch.Tensor.__setitem__
        try:
            return func(*args, **kwargs)
        finally:
            self._tape.is_assigning = False


def _make_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fresh: list[torch.Tensor | None]) -> Step:
    """Make the function that a replay calls for one operator. It avoids a Python frame if possible, for speed."""
    run = partial(without_python_frame(func), *args, **kwargs)
    if not any(tensor is not None for tensor in fresh):
        return run
    if func in _COPIES:
        assert fresh[0] is not None
        return partial(fresh[0].copy_, args[0])
    is_all_fresh = not schema_of(func).is_mutable and all(tensor is not None for tensor in fresh)
    writing = _find_out_form(func, len(fresh)) if is_all_fresh else None
    if writing is not None:
        out_names = [argument.name for argument in schema_of(writing).arguments if argument.is_out]
        kept = {argument.name for argument in schema_of(writing).arguments}
        options = {name: value for name, value in kwargs.items() if name in kept}
        return partial(without_python_frame(writing), *args, **options, **dict(zip(out_names, fresh, strict=True)))
    if len(fresh) == 1:
        assert fresh[0] is not None
        return _copying_one(run, fresh[0])
    return _copying_all(run, fresh)


def _copying_one(run: Callable[[], Any], result: torch.Tensor) -> Step:
    copy = result.copy_

    def step() -> None:
        value = run()
        copy(value if isinstance(value, torch.Tensor) else next(tensors_in(value)))

    return step


def _copying_all(run: Callable[[], Any], results: list[torch.Tensor | None]) -> Step:
    def step() -> None:
        for value, result in zip(tensors_in(run()), results, strict=True):
            if result is not None:
                result.copy_(value)

    return step


@cache
def _find_out_form(func: Any, num_results: int) -> Any | None:
    """Find the native out= overload with the same arguments; None if there is none.

    Generated out= overloads call the functional form and copy, which saves nothing.
    """
    wanted = _signature(func, drop_options=True)
    namespace, name = func.name().split(".")[0].split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    for name in packet.overloads():
        candidate = getattr(packet, name)
        if torch.Tag.generated in candidate.tags:
            continue
        num_out = sum(argument.is_out for argument in schema_of(candidate).arguments)
        if num_out == num_results and _signature(candidate, drop_options=False) == wanted:
            return candidate
    return None


def _signature(func: Any, drop_options: bool) -> list[tuple[str, str, bool]]:
    """Return name, type and kind of each argument that an overload reads.

    `drop_options` leaves out a factory's options, which its out tensor determines.
    """
    arguments = [argument for argument in schema_of(func).arguments if not argument.is_out]
    is_factory = not any("Tensor" in str(argument.type) for argument in arguments)
    dropped = _FACTORY_OPTIONS if drop_options and is_factory else set()
    return [(a.name, str(a.type), a.kwarg_only) for a in arguments if a.name not in dropped]


def poison(tensor: torch.Tensor) -> None:
    """Fill the memory a tensor lies in: NaN in floats, -1 in signed integers, True in booleans."""
    _bytes_of(tensor).fill_(1 if tensor.dtype is torch.bool else 0xFF)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory that a tensor lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
