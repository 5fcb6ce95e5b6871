"""The CPU recorder: replays equal eager runs to the bit, and what a CUDA graph would freeze or refuse shows here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.engine.capture import CaptureError
from spec_lab.engine.tape import TapeGraph
from tests.captures import capture, flat, same

ROWS, WIDTH, CAPACITY = 4, 8, 6


@dataclass
class Buffers:
    """Persistent tensors; functions under test read all of them and write `bank`, `total` and `lens`."""

    x: torch.Tensor
    ids: torch.Tensor
    column: torch.Tensor
    bank: torch.Tensor
    total: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def make(cls) -> Buffers:
        return cls(
            x=torch.zeros(ROWS, WIDTH),
            ids=torch.arange(ROWS),
            column=torch.zeros(1, dtype=torch.int64),
            bank=torch.zeros(CAPACITY, WIDTH),
            total=torch.zeros(ROWS, WIDTH),
            lens=torch.zeros(ROWS, dtype=torch.int64),
        )

    def fill(self, seed: int) -> None:
        """Put new inputs at the old addresses; what the functions write is left alone."""
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        self.ids.copy_(torch.randperm(CAPACITY, generator=generator)[:ROWS])
        self.column.fill_(seed % WIDTH)

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


Function = Callable[[Buffers], Any]


def assert_replays_equal_eager(function: Function, num_replays: int = 3) -> TapeGraph[Any]:
    """Check that outputs and all state are equal bit for bit after each replay with other inputs, and that outputs stay
    where they are.
    """
    taped, eager = Buffers.make(), Buffers.make()
    graph = capture(lambda: function(taped))
    with torch.inference_mode():
        function(eager)  # the warm-up
    assert same(taped.tensors(), eager.tensors()), "the recording itself changed state"
    addresses = [tensor.data_ptr() for tensor in flat(graph.outputs)]
    for seed in range(1, num_replays + 1):
        taped.fill(seed)
        eager.fill(seed)
        graph.replay()
        with torch.inference_mode():
            expected = function(eager)
        assert same(flat(graph.outputs), flat(expected)), f"outputs of replay {seed}"
        assert same(taped.tensors(), eager.tensors()), f"state after replay {seed}"
    assert [tensor.data_ptr() for tensor in flat(graph.outputs)] == addresses
    return graph


@torch.library.custom_op("spec_lab_test::scale_into", mutates_args={"out"})
def scale_into(rows: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Scale in an operator that comes as a Triton launch does: its body is free to look at values and addresses."""
    assert rows.data_ptr() and float(rows.sum()) == float(rows.sum())
    out.copy_(torch.tensor(rows.tolist()) * factor)


@torch.library.custom_op("spec_lab_test::halves", mutates_args={"counter"})
def halves(rows: torch.Tensor, counter: torch.Tensor) -> list[torch.Tensor]:
    """Write one argument, and return new tensors."""
    counter += 1
    return [half.clone() for half in rows.chunk(2)]


def running_state(b: Buffers) -> Any:
    b.total += b.x
    b.lens.add_(b.ids).clamp_(max=40)
    b.x.mul_(2)
    return b.total.sum(dim=-1), b.total.mean()


def written_views(b: Buffers) -> Any:
    grid = b.x.new_zeros((ROWS, WIDTH))
    grid[:, 1] = b.x[:, 0]
    grid[0, 2:4] = 7.0
    grid.view(2, 2, WIDTH)[1].add_(1)
    grid.t()[3:5] *= b.x.t()[3:5]
    b.bank[1:3] = b.x[:2]
    b.bank[0] = 1
    b.bank.view(-1)[::5] += 0.5
    return grid, grid[1:], grid.t().reshape(-1)


def aliases_of_inputs(b: Buffers) -> Any:
    b.x += 1
    return b.x, b.x[1:], b.x.view(-1), b.bank


def written_after_a_view(b: Buffers) -> Any:
    """A function in which what reads a view sees what was written to the whole, before and after."""
    fresh = b.x * 1
    row = fresh[2]
    before = row + 0
    fresh.fill_(3)
    after = row * 2
    row.copy_(b.x[0])
    return before, after, fresh


def indexing(b: Buffers) -> Any:
    b.bank.index_copy_(0, b.ids, b.x)
    b.bank.index_add_(0, b.ids, b.x)
    b.bank.index_put_((b.ids, b.column.expand_as(b.ids)), b.x[:, 0])
    picked = b.bank.index_select(0, b.ids), b.bank[b.ids], b.bank[b.ids, 1], F.embedding(b.ids, b.bank)
    gathered = b.x.gather(1, b.ids.unsqueeze(1)), b.x.index_select(1, b.column)
    scattered = torch.zeros_like(b.bank).scatter_(1, b.ids.unsqueeze(1), 1.0), b.bank.scatter(0, b.ids[None], b.x[:1])
    return picked, gathered, scattered, b.x.masked_fill(b.x > 0, -torch.inf), torch.where(b.x > 0, b.x, 0.0)


def several_results(b: Buffers) -> Any:
    values, order = torch.sort(b.x, dim=-1, descending=True, stable=True)
    top, least = b.x.topk(3), b.x.min(dim=0)
    pieces = [piece * 2 for piece in b.x.split(3)]
    left, right = b.x.chunk(2, dim=-1)
    kept = b.x.split_with_sizes_copy([1, 3]) if hasattr(b.x, "split_with_sizes_copy") else torch.unbind_copy(b.x)
    return values, order, *top, *least, pieces, left * right, [row + 1 for row in b.x], *b.x.cummax(dim=1), *kept


def empty_tensors(b: Buffers) -> Any:
    none = b.x[:0]
    return none, none * 2, torch.cat((none, b.x)), none.sum(dim=0), b.x.new_zeros((0, 3)), b.ids[:0] + 1


def custom_operators(b: Buffers) -> Any:
    room = torch.empty_like(b.x)
    torch.ops.spec_lab_test.scale_into(b.x, 3.0, room)
    torch.ops.spec_lab_test.scale_into(room, 0.5, b.total)
    first, second = torch.ops.spec_lab_test.halves(b.x, b.lens)
    return room, first - second


SEQUENCES: list[Function] = [
    running_state,
    written_views,
    aliases_of_inputs,
    written_after_a_view,
    indexing,
    several_results,
    empty_tensors,
    custom_operators,
]


@pytest.mark.parametrize("function", SEQUENCES, ids=lambda function: function.__name__)
def test_replays_equal_eager(function: Function) -> None:
    assert_replays_equal_eager(function)


Operation = Callable[[list[torch.Tensor], int], None]


def _append(make: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    return lambda pool, which: pool.append(make(pool[which % len(pool)]))


def _write(change: Callable[[torch.Tensor], object]) -> Operation:
    return lambda pool, which: (change(pool[which % len(pool)]), None)[1]


def _copy_over(pool: list[torch.Tensor], which: int) -> None:
    target = pool[which % len(pool)]
    target.copy_(pool[which // 2 % len(pool)].reshape(-1)[:1].clone())


OPERATIONS: list[Operation] = [
    _append(lambda t: t * 2 - 1),
    _append(lambda t: t.flip(0)),
    _append(lambda t: t.cumsum(-1) / 8),
    _append(lambda t: torch.cat((t, t)).clamp(-9, 9)),
    _append(lambda t: t.reshape(-1)),
    _append(lambda t: t.unsqueeze(0).transpose(0, -1)),
    _append(lambda t: t[1:]),
    _append(lambda t: t[..., ::2]),
    _append(lambda t: t.contiguous()),
    _append(lambda t: t.sort(dim=-1).values),
    _write(lambda t: t.add_(1)),
    _write(lambda t: t[..., :1].mul_(0.5)),
    _write(lambda t: t.clamp_(-4, 4)),
    _copy_over,
]


@settings(max_examples=40)
@given(program=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 63)), min_size=1, max_size=12))
def test_any_mix_of_views_and_writes_equals_eager(program: list[tuple[Operation, int]]) -> None:
    """Each operation takes a tensor of the pool: an input, a result, or a view of either, to read or to write."""

    def function(buffers: Buffers) -> list[torch.Tensor]:
        pool = [buffers.x, buffers.total]
        for operation, which in program:
            operation(pool, which)
        return pool

    assert_replays_equal_eager(function, num_replays=2)


def test_views_and_allocations_are_no_nodes() -> None:
    x, room = torch.zeros(2, 4), torch.empty(0)

    def function() -> Any:
        nonlocal room
        room = torch.empty(4, 2)
        return x.t()[1:].view(3, 2), room, x.t() + 1

    assert capture(function).num_nodes == 1


def test_recording_is_undone_and_warming_up_is_not() -> None:
    """A CUDA capture executes nothing; what runs before it does."""
    counter, seen = torch.zeros(3), torch.zeros(3, 2)

    def function() -> torch.Tensor:
        counter[1:] += 1
        seen.view(-1)[2:] -= 1
        return counter + 1

    graph = capture(function, num_warmups=0)
    assert counter.eq(0).all() and seen.eq(0).all()
    assert graph.outputs.isnan().all(), "results are undefined before the first replay"
    graph.replay()
    assert counter.tolist() == [0, 1, 1] and graph.outputs.tolist() == [1, 2, 2]
    capture(function, num_warmups=2)
    assert counter.tolist() == [0, 3, 3]


def test_a_refused_capture_leaves_state_as_it_was() -> None:
    counter = torch.zeros(3)

    def function() -> float:
        counter.add_(1)
        return counter.sum().item()

    with pytest.raises(CaptureError):
        capture(function, num_warmups=0)
    assert counter.eq(0).all()
    assert counter.sum().item() == 0, "the tape is off again"


def test_inputs_live_as_long_as_the_graph() -> None:
    x = torch.ones(1000)
    graph = capture(lambda weight=x * 3: x * weight)
    (first, second) = graph.inputs
    assert graph.uses(x) and graph.uses(x[5:]) and {first.data_ptr(), second.data_ptr()} >= {x.data_ptr()}
    gc.collect()
    junk = [torch.full((1000,), -1.0) for _ in range(50)]
    graph.replay()
    assert graph.outputs.eq(3).all() and junk


# What the tape is for: the four mistakes of a captured draft loop.


def test_a_step_index_kept_as_a_python_number_shows() -> None:
    drafts, column, token = torch.zeros(2, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1)
    index = 1

    def frozen() -> None:
        drafts[:, index] = token[:, 0]

    def on_the_device() -> None:
        drafts.index_copy_(1, column, token)

    results = []
    for step in (frozen, on_the_device):
        index = 1
        drafts.zero_()
        graph = capture(step)
        for index in range(1, 4):
            column.fill_(index)
            token.fill_(index)
            graph.replay()
        results.append(drafts[0].tolist())
    assert results == [[0, 3, 0, 0], [0, 1, 2, 3]]


def test_a_replaced_buffer_shows() -> None:
    state = {"lens": torch.zeros(2)}
    graph = capture(lambda: state["lens"] * 10)
    assert graph.uses(state["lens"])
    state["lens"] += 1
    graph.replay()
    assert graph.uses(state["lens"]) and graph.outputs.tolist() == [10, 10]
    state["lens"] = state["lens"] + 1
    graph.replay()
    assert not graph.uses(state["lens"])
    assert graph.outputs.tolist() == [10, 10], "the old buffer is read"


def test_what_is_derived_once_and_kept_is_stale_after_the_warm_up() -> None:
    """As on a GPU: a mask that a container keeps must be derived inside the graph or updated in place."""
    lens, kept = torch.tensor([1.0]), {}

    def function() -> torch.Tensor:
        if "mask" not in kept:
            kept["mask"] = lens * 2
        return kept["mask"] + 0

    graph = capture(function)
    lens.fill_(5)
    graph.replay()
    assert graph.outputs.item() == 2


HOST_READ, HOST_WRITE = "reads a device value on the host", "copies Python values to the device"
SHAPE, RANDOM = "shape of its result depends on values", "random generator"
NEW_SHAPE, NEW_MEMORY = "changes the shape of a recorded tensor", "points a tensor at other memory"
REFUSED: dict[str, tuple[Function, str, str]] = {
    "item": (lambda b: b.x.sum().item(), "Tensor.item", HOST_READ),
    "bool": (lambda b: 1 if b.x.any() else 0, "Tensor.__bool__", HOST_READ),
    "int": (lambda b: int(b.column), "Tensor.__int__", HOST_READ),
    "float": (lambda b: float(b.column), "Tensor.__float__", HOST_READ),
    "index": (lambda b: range(b.column), "Tensor.__index__", HOST_READ),
    "slice": (lambda b: b.x[: b.column + 1], "_local_scalar_dense", HOST_READ),
    "tolist": (lambda b: b.x.tolist(), "Tensor.tolist", HOST_READ),
    "numpy": (lambda b: b.x.numpy(), "Tensor.numpy", HOST_READ),
    "cpu": (lambda b: b.x.cpu(), "Tensor.cpu", HOST_READ),
    "to_cpu": (lambda b: b.x.to("cpu"), "Tensor.to", HOST_READ),
    "repr": (lambda b: f"{b.x}", "Tensor.__format__", HOST_READ),
    "contains": (lambda b: 3 in b.ids, "Tensor.__contains__", HOST_READ),
    "equal": (lambda b: torch.equal(b.x, b.x), "aten.equal", HOST_READ),
    "one_hot": (lambda b: F.one_hot(b.ids), "_local_scalar_dense", HOST_READ),
    "tensor": (lambda b: torch.tensor([1, 2]), "torch.tensor", HOST_WRITE),
    "as_tensor": (lambda b: torch.as_tensor([1, 2]), "torch.as_tensor", HOST_WRITE),
    "constructor": (lambda b: torch.LongTensor([1, 2]), "aten.lift_fresh", HOST_WRITE),
    "new_tensor": (lambda b: b.x.new_tensor([1, 2]), "Tensor.new_tensor", HOST_WRITE),
    "list_index": (lambda b: b.x[[0, 1]], "aten.lift_fresh", HOST_WRITE),
    "list_assigned": (lambda b: b.x.__setitem__([0, 1], 5.0), "aten.lift_fresh", HOST_WRITE),
    "mask": (lambda b: b.x[b.x > 0], "aten.index.Tensor", SHAPE),
    "mask_assigned": (lambda b: b.x.__setitem__(b.x > 0, 0.0), "aten.index_put_", SHAPE),
    "nonzero": (lambda b: b.x.nonzero(), "aten.nonzero", SHAPE),
    "where": (lambda b: torch.where(b.x > 0), "aten.nonzero", SHAPE),
    "masked_select": (lambda b: b.x.masked_select(b.x > 0), "aten.masked_select", SHAPE),
    "unique": (lambda b: b.ids.unique(), "aten._unique2", SHAPE),
    "repeats": (lambda b: b.x.repeat_interleave(b.ids, dim=0), "aten.repeat_interleave", SHAPE),
    "rand": (lambda b: torch.rand(3), "aten.rand", RANDOM),
    "multinomial": (lambda b: b.x.softmax(-1).multinomial(1), "aten.multinomial", RANDOM),
    "dropout": (lambda b: F.dropout(b.x), "aten", RANDOM),
    "reshaped_in_place": (lambda b: (b.x * 1).unsqueeze_(0), "aten.unsqueeze_", NEW_SHAPE),
    "resized": (lambda b: (b.x * 1).resize_(2), "aten.resize_", NEW_SHAPE),
    "data": (lambda b: setattr(b.x, "data", b.x * 2), "Tensor.data", NEW_MEMORY),
    "set": (lambda b: (b.x * 1).set_(b.total), "aten.set_", NEW_MEMORY),
    "opaque": (lambda b: b.x.to_mkldnn(), "aten.to_mkldnn", "no plain memory"),
    "address": (lambda b: b.x.data_ptr(), "Tensor.data_ptr", "torch.library.custom_op"),
    "other_device": (lambda b: b.x.to("meta"), "aten._to_copy", "one device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_can_hold_is_refused(case: str) -> None:
    function, operator, reason = REFUSED[case]
    buffers = Buffers.make()
    with pytest.raises(CaptureError) as refusal:
        capture(lambda: function(buffers), num_warmups=0)
    message = str(refusal.value)
    assert operator in message and reason in message
    assert f"{__file__}:{function.__code__.co_firstlineno}" in message


ALLOWED: dict[str, Function] = {
    "same_device": lambda b: b.x.to(b.ids.device) + 1,
    "as_tensor": lambda b: torch.as_tensor(b.x) * 2,
    "output_size": lambda b: b.x.repeat_interleave(torch.full_like(b.ids, 2), dim=0, output_size=2 * ROWS),
    "no_dropout": lambda b: F.dropout(b.x, 0.5, training=False) + 1,
    "shape": lambda b: b.x * b.x.shape[0] if len(b.x) and b.x.dtype is torch.float32 else b.x,
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_looks_alike_is_not_refused(case: str) -> None:
    assert_replays_equal_eager(ALLOWED[case])
