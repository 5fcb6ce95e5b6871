"""The benchmark of delta nets: what is timed does not find its states in L2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

BENCH = Path(__file__).parents[1] / "kernels/bench"


class WithoutGpu(TorchFunctionMode):
    """Makes tensors of shapes alone in place of those on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if "device" in kwargs else kwargs))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Give the script, and forget it and its neighbours afterwards."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("delta_net")
    for script in BENCH.glob("*.py"):
        sys.modules.pop(script.stem, None)


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_the_states_of_all_calls_exceed_l2(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    net = bench.Net()
    seen: dict[str, set[tuple[int, int]]] = {"rule": set(), "replay": set()}

    def note(name: str) -> Any:
        return lambda out, states, *rest: seen[name].add((states.storage_offset(), states[:batch].nbytes))

    monkeypatch.setattr(bench.delta_rule, "delta_rule", note("rule"))
    monkeypatch.setattr(bench.delta_rule, "delta_replay", note("replay"))
    monkeypatch.setattr(bench.delta_kept, "keep_delta_rows", lambda *rest: None)
    with WithoutGpu():
        for case in bench.cases(net, batch, 4, is_prompt=False):
            if case.name in seen:
                for index in range(bench.LAUNCHES):
                    case.kernel(index)
    for name, states in seen.items():
        assert sum(num_bytes for _, num_bytes in states) > bench.L2_BYTES, name
