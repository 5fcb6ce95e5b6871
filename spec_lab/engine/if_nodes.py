"""IF nodes of CUDA graphs (CUDA 12.4): a replay skips the node's body if a condition on the device is false.

torch 2.13 can capture into such a node, but 2.11 cannot, so this module calls the driver. A kernel of one thread sets
the condition. The node is added after it in the graph under capture. Its body is captured from another stream, and may
contain further nodes. Bodies allocate from a memory pool of their own. Otherwise torch could reuse their memory
elsewhere once it is freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_SET_IF_ANY = r"""
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
extern "C" __global__ void set_if_any(int low, int high, const long long* values, int num_values, int idle) {
    unsigned int any = 0;
    for (int i = 0; i < num_values; ++i) any |= values[i] != idle;
    cudaGraphSetConditional(((unsigned long long)(unsigned int)high << 32) | (unsigned int)low, any);
}
"""
_SINCE_CUDA = 12040
# CUgraphNodeType, CUgraphConditionalNodeType, CUstreamUpdateCaptureDependencies_flags, CUstreamCaptureMode,
# CUstream_flags.
_CONDITIONAL, _IF, _SET_DEPENDENCIES, _RELAXED, _NON_BLOCKING = 13, 0, 1, 2, 1


class _ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS of the driver."""

    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
    )


class _AnyParams(ctypes.Union):
    _fields_ = (("reserved", ctypes.c_longlong * 29), ("conditional", _ConditionalParams))


class _NodeParams(ctypes.Structure):
    """CUgraphNodeParams of the driver."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("any", _AnyParams),
        ("reserved2", ctypes.c_longlong),
    )


class IfNodes:
    """Makes IF nodes in the graphs that are captured on one device."""

    def __init__(self, device: torch.device) -> None:
        self._bodies: list[int] = []
        self._depth = 0
        self._streams: list[torch.cuda.ExternalStream] = []
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(device):
            self._set_if_any = torch.cuda._compile_kernel(_SET_IF_ANY, "set_if_any")
            self._pool = torch.cuda.MemPool()

    @contextmanager
    def when_any(self, values: torch.Tensor, idle: int) -> Iterator[None]:
        """Let a replay skip the body if all of `values` [batch] equal `idle`.

        Later code may only read what the body copies into tensors that existed before it. Outside a capture the body
        always runs.
        """
        stream = torch.cuda.current_stream()
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        from spec_kernels.early import launched_plainly

        body = self._add_node(stream, values, idle)
        self._bodies.append(body)
        inner = self._stream_inside()
        side = ctypes.c_void_p(inner.cuda_stream)
        # Nested bodies use the pool of the outermost one, since torch cannot enter a pool twice.
        pool = nullcontext() if self._depth else torch.cuda.use_mem_pool(self._pool)
        with torch.cuda.stream(inner), pool:
            self._call(
                "cuStreamBeginCaptureToGraph", side, ctypes.c_void_p(body), None, None, ctypes.c_size_t(0), _RELAXED
            )
            self._depth += 1
            try:
                with launched_plainly():
                    yield
            finally:
                self._depth -= 1
                self._call("cuStreamEndCapture", side, ctypes.byref(ctypes.c_void_p()))

    def _stream_inside(self) -> torch.cuda.ExternalStream:
        """Return the stream from which bodies at this depth are captured. The streams of all outer bodies are in use.

        The driver makes the stream, since torch reuses its 32 streams in turn.
        """
        if self._depth == len(self._streams):
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            assert stream.value is not None
            self._streams.append(torch.cuda.ExternalStream(stream.value))
        return self._streams[self._depth]

    def take_bodies(self) -> list[int]:
        """Return the addresses of the body graphs of all nodes made since the last call."""
        bodies, self._bodies = self._bodies, []
        return bodies

    def _add_node(self, stream: torch.cuda.Stream, values: torch.Tensor, idle: int) -> int:
        """Capture the condition, then the node; return the address of the node's body graph."""
        context, handle, node = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        graph, *_ = self._captured(stream)
        self._call("cuGraphConditionalHandleCreate", ctypes.byref(handle), graph, context, 0, 0)
        halves = [ctypes.c_int(part & 0xFFFFFFFF).value for part in (handle.value, handle.value >> 32)]
        self._set_if_any((1, 1, 1), (1, 1, 1), [*halves, values, values.shape[0], idle])
        params = _NodeParams(type=_CONDITIONAL)
        params.any.conditional = _ConditionalParams(handle=handle, type=_IF, size=1, context=context)
        self._call("cuGraphAddNode_v2", ctypes.byref(node), *self._captured(stream), ctypes.byref(params))
        nodes = (ctypes.c_void_p * 1)(node)
        self._call(
            "cuStreamUpdateCaptureDependencies_v2",
            ctypes.c_void_p(stream.cuda_stream),
            nodes,
            None,
            ctypes.c_size_t(1),
            _SET_DEPENDENCIES,
        )
        return int(params.any.conditional.bodies[0])

    def _captured(
        self, stream: torch.cuda.Stream
    ) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]:
        """Return the graph that `stream` is captured into, and the dependencies of its next node: nodes, edges,
        count."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, edges, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        outputs = map(ctypes.byref, (status, number, graph, nodes, edges, count))
        self._call("cuStreamGetCaptureInfo_v3", ctypes.c_void_p(stream.cuda_stream), *outputs)
        return graph, nodes, edges, count

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} gave CUresult {result}")


def has_if_nodes() -> bool:
    """Return whether this machine's driver has IF nodes."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= _SINCE_CUDA
