"""Records a function of device tensors once, and replays it without its Python: the contract, and CUDA graphs.

`spec_lab.engine.tape` implements the same contract on a CPU. The contract is that of CUDA graphs (CUDA programming
guide, stream capture). Python values are frozen at capture. A replay reads and writes the memory that was recorded, so
buffers must be mutated and never replaced. Recording changes no tensor that existed before.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from spec_lab.core.errors import describe_error

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class CaptureError(RuntimeError):
    """A function did something that cannot be captured. The message names the operation, the place and the remedy."""


class CapturedGraph(Protocol[Result_co]):
    """A recorded function that can be replayed."""

    @property
    def outputs(self) -> Result_co:
        """Return the tensors that the function returned while it was recorded. Each replay rewrites them in place.

        Their contents are undefined before the first replay.
        """
        ...

    @property
    def num_nodes(self) -> int | None:
        """Count the graph's device operations: kernels, copies and fills; None if they cannot be counted.

        The tape counts operators that compute or write, but no views or allocations. One operator may launch several
        kernels, and one kernel may replace several operators. So the numbers of the two devices differ.
        """
        ...

    def replay(self) -> None:
        """Run the recorded operations on the current contents of the recorded buffers."""
        ...


class GraphRecorder(Protocol):
    """Captures functions of one device.

    Attributes:
        num_copies: graphs to make of one function, which are replayed in turn. With two, the events inside one can be
            read while the other runs.
    """

    num_copies: int

    def capture(self, function: Callable[[], Result]) -> CapturedGraph[Result]:
        """Record `function`, after some warm-up runs.

        The warm-ups really execute, so `function` must work on scratch slots if state has to survive. The recording
        itself changes no tensor that existed before. Everything runs under `torch.inference_mode()`.

        Raises:
            CaptureError: `function` does something that cannot be captured.
        """
        ...


@dataclass(slots=True)
class CudaCapturedGraph(Generic[Result]):
    """Replays a `torch.cuda.CUDAGraph`. A graph only holds addresses; `_function` keeps the tensors behind them
    alive."""

    outputs: Result
    num_nodes: int | None
    _graph: torch.cuda.CUDAGraph
    _function: Callable[[], Result]

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder:
    """Captures on a side stream. Its graphs share a memory pool, so that they reuse each other's temporaries.

    Graphs must be replayed one after another on one stream. The outputs of a graph survive replays of graphs that were
    captured later. A replay of an earlier graph may overwrite them, since its temporaries may share their memory. A
    round captures its segments in order, so it reads each output in time.
    """

    num_copies = 2

    def __init__(self, device: torch.device, num_warmups: int = 2) -> None:
        """Set the number of warm-ups. In the first, kernels are compiled and libraries choose theirs; the second runs
        these kernels."""
        self._device = device
        self._num_warmups = num_warmups
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Result]) -> CudaCapturedGraph[Result]:
        with torch.inference_mode(), torch.cuda.device(self._device):
            self._warm_up(function)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            outputs = self._record(graph, function)
            num_nodes = count_graph_nodes(graph.raw_cuda_graph())
            graph.instantiate()
        return CudaCapturedGraph(outputs, num_nodes, graph, function)

    def _warm_up(self, function: Callable[[], Result]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self._num_warmups):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], Result]) -> Result:
        try:
            # thread_local: other threads, such as a logger's, may use the device during the capture. Freeing a graph or
            # a pool during a capture aborts it, and the garbage collector may do that.
            with (
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                garbage_waits(),
            ):
                return function()
        except BaseException as error:
            # An aborted capture leaves its pool unusable (torch 2.11: "already recording").
            self._pool = torch.cuda.graph_pool_handle()
            if not isinstance(error, RuntimeError):
                raise
            raise CaptureError(explain_capture_error(error)) from error


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Switch Python's garbage collector off inside, and back on afterwards if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def explain_capture_error(error: BaseException) -> str:
    """Describe why a CUDA capture failed: by its first error, and not by the later one of ending a failed capture."""
    first = error
    while (earlier := first.__cause__ or first.__context__) is not None:
        first = earlier
    place, frame = "", first.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if path != __file__ and not is_torch_file(path):
            place = f" at {path}:{frame.tb_lineno}"
        frame = frame.tb_next
    summary = describe_error(first).splitlines()[0]
    return (
        f"this cannot be captured in a CUDA graph{place}: {summary}. Usual causes: .item(), .tolist(), .cpu(), "
        "torch.tensor(...) from Python values, boolean indexing, shapes that depend on values; keep the value on the "
        "device, or use graph=eager"
    )


def is_torch_file(path: str) -> bool:
    """Return whether a source file belongs to torch, so that an error is attributed to a caller outside it."""
    return path.startswith((_TORCH_FOLDER, "<"))


_TORCH_FOLDER = torch.__path__[0]


# CUgraphNodeType of the driver API: kernel, memcpy, memset. Event and empty nodes do no work.
_WORK_NODES = {0, 1, 2}


def count_graph_nodes(graph: int) -> int | None:
    """Count kernels, copies and fills of the graph at this address; None if the driver is missing or fails.

    It calls the driver through ctypes, since torch exposes a graph's address but no node count.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    address, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(address, None, ctypes.byref(count)) != 0:
        return None
    nodes, kind = (ctypes.c_void_p * count.value)(), ctypes.c_int()
    if driver.cuGraphGetNodes(address, nodes, ctypes.byref(count)) != 0:
        return None
    num_work = 0
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) != 0:
            return None
        num_work += kind.value in _WORK_NODES
    return num_work
