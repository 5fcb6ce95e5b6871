"""A segment: a part of a round that is captured once, and then replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from spec_lab.core.results import GraphCounts
from spec_lab.core.trees import copy_tensors, map_tensors
from spec_lab.engine.capture import CapturedGraph, CaptureError, GraphRecorder
from spec_lab.engine.parts import Parts

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


@dataclass(eq=False)
class Segment(Generic[Inputs, Outputs]):
    """Runs a function from inputs to outputs, both trees of tensors, as one graph.

    The first call captures, and must be given rows of the scratch slot only. Inputs are copied into buffers of the
    segment, except tensors in `fixed`, such as outputs of other segments. These are read in place, so later calls must
    pass the very same tensor objects. The segment adds its own outputs to `fixed`. A replay counts as `stage` if the
    spans inside cannot be timed separately.
    """

    name: str
    stage: str
    function: Callable[[Inputs], Outputs]
    recorder: GraphRecorder
    parts: Parts  # not the timer itself, since a profile replaces it
    counts: GraphCounts
    fixed: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.graph: CapturedGraph[Outputs] | None = None
        self._inputs: Inputs | None = None
        self._marks: list[Any] = []

    def __call__(self, inputs: Inputs) -> Outputs:
        if self.graph is None:
            self.graph = self._capture(inputs)
        copy_tensors(self._inputs, inputs)
        with self.parts.timer.replay(self.stage, self._marks):
            self.graph.replay()
        self.counts.replays += 1
        return self.graph.outputs

    def _capture(self, inputs: Inputs) -> CapturedGraph[Outputs]:
        def buffer(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if any(tensor is known for known in self.fixed) else tensor.clone()

        def note_fixed(tensor: torch.Tensor) -> torch.Tensor:
            self.fixed.append(tensor)
            return tensor

        self._inputs = buffers = map_tensors(inputs, buffer)
        with self.parts.timer.capture() as marks:

            def function() -> Outputs:
                marks.clear()  # marks of a warm-up are not in the graph
                # The function may store derived values in its input containers, so it gets copies of them.
                return self.function(map_tensors(buffers, lambda tensor: tensor))

            try:
                graph = self.recorder.capture(function)
            except LookupError as error:
                raise CaptureError(
                    f"{self.name}: {error!r}. A capture runs before any request is admitted: what is kept by request "
                    "has to lie in tensors with a row for each slot; use graph=eager for what is kept in Python"
                ) from error
        self._marks = marks
        map_tensors(graph.outputs, note_fixed)
        self.counts.captures += 1
        self.counts.nodes[self.name] = graph.num_nodes
        return graph
