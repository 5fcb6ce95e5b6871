"""What a captured segment copies, and what it reads where it stands."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_lab.core.results import GraphCounts
from spec_lab.core.trees import copy_tensors
from spec_lab.engine.capture import CaptureError
from spec_lab.engine.graphs.segment import Segment
from spec_lab.engine.tape import TapeGraph, TapeRecorder
from spec_lab.engine.timing import HostTimer


class KeepingRecorder(TapeRecorder):
    """A tape recorder that keeps the graphs it made."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[TapeGraph[Any]] = []

    def capture(self, function: Callable[[], Any]) -> TapeGraph[Any]:
        self.graphs.append(super().capture(function))
        return self.graphs[-1]


def chain(*functions: Callable[[Any], Any], recorder: TapeRecorder | None = None) -> list[Segment[Any, Any]]:
    """Segments that know of one another's outputs."""
    parts: Any = SimpleNamespace(timer=HostTimer())
    fixed: list[torch.Tensor] = []
    return [
        Segment(f"segment {number}", "stage", function, recorder or TapeRecorder(), parts, GraphCounts(), fixed)
        for number, function in enumerate(functions)
    ]


def test_an_output_of_another_segment_is_read_where_it_stands_and_a_launched_tensor_is_copied() -> None:
    recorder = KeepingRecorder()
    doubled, plus = chain(lambda x: x * 2, lambda pair: pair[0] + pair[1], recorder=recorder)
    for start in (1.0, 5.0):
        launched = torch.full((3,), start)
        middle = doubled(launched)
        assert plus((middle, launched)).tolist() == [3 * start] * 3
    assert recorder.graphs[1].uses(middle)
    assert not recorder.graphs[1].uses(launched)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:2],
    "shape": lambda x: x.view(1, 3),
    "alias": lambda x: x.detach(),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_an_input_at_the_address_of_an_output_never_overwrites_it(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first call passes a view of an output; the next one passes other values of that shape."""
    doubled, plus_one = chain(lambda x: x * 2, lambda x: x + 1)
    middle = doubled(torch.ones(3))
    plus_one(view(middle))
    other = view(torch.full((3,), 40.0))
    assert torch.equal(plus_one(other), other + 1)
    assert middle.tolist() == [2.0] * 3


def test_tensors_are_copied_unless_they_are_the_same_one() -> None:
    kept, buffer = torch.ones(2), torch.zeros(2)
    into = {"kept": kept, "copied": [buffer]}
    version = kept._version
    copy_tensors(into, {"kept": kept, "copied": [torch.full((2,), 3.0)]})
    assert kept._version == version and buffer.tolist() == [3.0, 3.0]
    with pytest.raises(AssertionError, match="cannot take"):
        copy_tensors(buffer, torch.zeros(3))
    with pytest.raises(AssertionError, match="frozen"):
        copy_tensors({"a": 1}, {"a": 2})


def test_what_is_kept_in_python_by_request_is_said_to_be_uncapturable() -> None:
    """A drafter's dictionary has no entry for the scratch slot of a warm-up."""
    texts: dict[int, torch.Tensor] = {0: torch.ones(3)}
    (kept,) = chain(lambda slot_ids: texts[slot_ids.tolist()[0]])
    with pytest.raises(CaptureError, match=r"KeyError\(1\).*tensors with a row for each slot.*graph=eager"):
        kept(torch.tensor([1]))
