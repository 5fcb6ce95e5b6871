"""Record a function of device tensors once, replay it without Python: the contract, and CUDA graphs.

`spec_lab.engine.tape` keeps the same contract on a CPU. What both promise, in the words of the CUDA programming guide
(CUDA graphs, stream capture): Python values are frozen at capture; a replay reads and writes the memory that was
recorded, so that buffers are mutated, never replaced; recording itself executes nothing.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from spec_lab.core.errors import describe_error
from spec_lab.engine.if_nodes import IfNodes, has_if_nodes

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class CaptureError(RuntimeError):
    """A function did what no graph can hold. The message names the operation, the place and the remedy."""


class CapturedGraph(Protocol[Result_co]):
    """Replays a function that was recorded."""

    @property
    def outputs(self) -> Result_co:
        """Return the tensors that the function returned while it was recorded; each replay rewrites them in place.

        Undefined before the first replay.
        """
        ...

    @property
    def num_nodes(self) -> int | None:
        """Count the device operations of one replay: kernels, copies and fills; None where they cannot be counted.

        The tape counts operators that compute or write (views and allocations are none). One operator can be several
        kernels, or one kernel several operators, so the two devices differ.
        """
        ...

    def replay(self) -> None:
        """Run the recorded operations on what the recorded buffers hold now."""
        ...


class GraphRecorder(Protocol):
    """Captures functions of one device.

    Attributes:
        skips: what stands inside `when_any` is left out of a replay; else it runs, for nobody.
        num_copies: graphs to make of one function, which are replayed in turn. With two the events inside one can be
            read while the other runs.
    """

    skips: bool
    num_copies: int

    def when_any(self, values: torch.Tensor, idle: int) -> AbstractContextManager[None]:
        """Stand around a stretch of a captured function which nobody needs where all of `values` [batch] are `idle`.

        `values` are 64-bit integers. The stretch hands nothing on but what it copies into tensors from before it; it
        may have others inside it.
        """
        ...

    def capture(self, function: Callable[[], Result]) -> CapturedGraph[Result]:
        """Record `function`, after warm-up runs of it.

        The warm-ups really run: with state that must survive, call it on scratch slots. The recording itself leaves
        every tensor that existed before it as it was. Everything runs under `torch.inference_mode()`.

        Raises:
            CaptureError: `function` does what a graph cannot hold.
        """
        ...


@dataclass(slots=True)
class CudaCapturedGraph(Generic[Result]):
    """Replays a `torch.cuda.CUDAGraph`. `_function` keeps alive what the graph reads: a graph holds addresses only."""

    outputs: Result
    num_nodes: int | None
    _graph: torch.cuda.CUDAGraph
    _function: Callable[[], Result]

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder:
    """Captures on a side stream; its graphs share one memory pool.

    Shared, so that graphs reuse each other's temporaries: replay them one after another on one stream, never at once.
    What a graph puts out stays as it is while graphs captured later are replayed, but may lie where an earlier one has
    its temporaries: use it before an earlier one is replayed, as a round does, whose segments are captured in order.
    """

    num_copies = 2

    def __init__(self, device: torch.device, num_warmups: int = 2) -> None:
        """Set the number of warm-ups: the first of two compiles kernels and lets libraries choose, the second runs
        that."""
        self._device = device
        self._num_warmups = num_warmups
        self.skips = has_if_nodes()
        self._if_nodes: IfNodes | None = None
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def when_any(self, values: torch.Tensor, idle: int) -> AbstractContextManager[None]:
        if not self.skips:
            return nullcontext()
        if self._if_nodes is None:  # in a warm-up: a kernel cannot be loaded while a stream is captured
            self._if_nodes = IfNodes(self._device)
        return self._if_nodes.when_any(values, idle)

    def capture(self, function: Callable[[], Result]) -> CudaCapturedGraph[Result]:
        with torch.inference_mode(), torch.cuda.device(self._device):
            self._warm_up(function)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            outputs = self._record(graph, function)
            bodies = [] if self._if_nodes is None else self._if_nodes.take_bodies()
            num_nodes = count_graph_nodes([graph.raw_cuda_graph(), *bodies])
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
            # thread_local: what other threads do to the device, a logger's for instance, is no business of this graph.
            # Garbage may hold graphs and pools, and freeing one in the middle of a capture breaks the capture off.
            with (
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                garbage_waits(),
            ):
                return function()
        except BaseException as error:
            # A capture that broke off leaves its pool closed to the next (torch 2.11: "already recording").
            self._pool = torch.cuda.graph_pool_handle()
            if not isinstance(error, RuntimeError):
                raise
            raise CaptureError(explain_capture_error(error)) from error


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Keep Python from collecting garbage inside; collecting goes on behind, where it was on before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def explain_capture_error(error: BaseException) -> str:
    """Say what a failed CUDA capture died of: the first error, not that of ending a capture which was broken
    already."""
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
    """Tell whether a source file is torch's own, so that an error's place is looked for further out."""
    return path.startswith((_TORCH_FOLDER, "<"))


_TORCH_FOLDER = torch.__path__[0]


# CUgraphNodeType of the driver API: kernel, memcpy, memset. Recorded events and empty joins are no work.
_WORK_NODES = {0, 1, 2}


def count_graph_nodes(addresses: Sequence[int]) -> int | None:
    """Count kernels, copies and fills of graphs made with `keep_graph=True`; None where the driver cannot be asked.

    Through ctypes: torch hands out a graph's address, and has no count of its own.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    counts = [_count_nodes(driver, address) for address in addresses]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count_nodes(driver: ctypes.CDLL, graph: int) -> int | None:
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


@dataclass(slots=True)
class SyncCount:
    """Counts the host synchronisations seen so far."""

    count: int = 0


_SYNC_WARNING = "called a synchronizing CUDA operation"


@contextmanager
def count_syncs() -> Iterator[SyncCount]:
    """Count the operations in its body that make the host wait for the GPU: .item(), copies from the device, ...

    By `torch.cuda.set_sync_debug_mode`, which sees torch's own operations: neither torch.cuda.synchronize() nor waiting
    for an event or a stream counts. The count is set when the body ends. Not for the timed stretch of a run: each one
    costs a Python warning.
    """
    seen = SyncCount()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            seen.count = sum(_SYNC_WARNING in str(warning.message) for warning in caught)
    for warning in caught:
        if _SYNC_WARNING not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
