"""A stretch of the round is captured once for a batch size, and replayed ever after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from spec_lab.core.results import GraphCounts
from spec_lab.core.trees import copy_tensors, map_tensors
from spec_lab.engine.capture import CapturedGraph, GraphRecorder
from spec_lab.engine.parts import Parts

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class Segment(Generic[Inputs, Outputs]):
    """Runs a function from inputs to outputs, both trees of tensors, as one graph.

    The first call captures and must be given rows of the scratch slot only. Inputs are copied into buffers of its own.
    An input that is one of the tensors in `fixed`, the outputs of other segments, is read where it stands: it has to be
    that very tensor, since a view or a new tensor at the same address is another one at the next call. The segment adds
    its own outputs to `fixed`. Its replays count as `stage` where the spans inside cannot be told apart.
    """

    def __init__(
        self,
        name: str,
        stage: str,
        function: Callable[[Inputs], Outputs],
        recorder: GraphRecorder,
        parts: Parts,
        counts: GraphCounts,
        fixed: list[torch.Tensor],
    ) -> None:
        self._name = name
        self._stage = stage
        self._function = function
        self._recorder = recorder
        self._parts = parts  # asked for its timer at each call: a profile puts another in its place
        self._counts = counts
        self._fixed = fixed
        self.graph: CapturedGraph[Outputs] | None = None
        self._inputs: Inputs | None = None
        self._marks: list[Any] = []

    def __call__(self, inputs: Inputs) -> Outputs:
        if self.graph is None:
            self.graph = self._capture(inputs)
        copy_tensors(self._inputs, inputs)
        with self._parts.timer.replay(self._stage, self._marks):
            self.graph.replay()
        self._counts.replays += 1
        return self.graph.outputs

    def _capture(self, inputs: Inputs) -> CapturedGraph[Outputs]:
        self._inputs = buffers = map_tensors(inputs, self._buffer)
        with self._parts.timer.capture() as marks:

            def function() -> Outputs:
                marks.clear()  # those of a warm-up are not in the graph
                # The function may keep what it derives on the containers it is given, so it gets its own.
                return self._function(map_tensors(buffers, _same))

            graph = self._recorder.capture(function)
        self._marks = marks
        map_tensors(graph.outputs, self._note_fixed)
        self._counts.captures += 1
        self._counts.nodes[self._name] = graph.num_nodes
        return graph

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if any(tensor is known for known in self._fixed) else tensor.clone()

    def _note_fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        self._fixed.append(tensor)
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
