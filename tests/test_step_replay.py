"""graph=step_replay: between two replays the host builds a step's metadata once for each kind of cache and window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.options.graphs import StepReplay
from tests.lab import assert_captured_alike, make_config, make_engine, make_pair, random_requests
from tests.tiny_checkpoints import make_tiny_target

SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "num_hidden_layers": 4}


@pytest.mark.parametrize(("drafter", "kinds"), [("draft_model", [None, 6]), ("eagle3", [5])])
def test_metadata_is_built_for_each_window(
    drafter: str, kinds: list[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K = 4 there are three replays a round. The graph of a step reads slots and masks that the host derived."""
    pair = make_pair(tmp_path)
    options: dict[str, Any] = {"window": 5} if drafter == "eagle3" else {}
    if drafter == "draft_model":
        make_tiny_target(tmp_path / "drafts", "qwen2", **SLIDING)
        pair = pair[0], tmp_path / "drafts"
    config = make_config(pair, drafter, 4, "catchup", graph=StepReplay(), options=options)
    requests = random_requests(2, 12)
    engine = make_engine(config, requests)
    engine.prepare()
    built: list[torch.Size] = []
    derived: list[int | None] = []
    build, derive, run = TorchAttention.build, TorchAttention.derive, engine.graph.run

    def counted_build(self: TorchAttention, positions: torch.Tensor, *rest: Any, **more: Any) -> Any:
        built.append(positions.shape)
        return build(self, positions, *rest, **more)

    def counted_derive(self: TorchAttention, metadata: Any, kind: Any, dtype: torch.dtype) -> None:
        derived.append(kind.window)
        derive(self, metadata, kind, dtype)

    def counted_run(*inputs: Any) -> Any:
        built.clear()
        derived.clear()
        verification = run(*inputs)
        assert built == [torch.Size((1, 1))] * 3 * len(kinds) and derived == kinds * 3
        return verification

    with monkeypatch.context() as patch:
        patch.setattr(TorchAttention, "build", counted_build)
        patch.setattr(TorchAttention, "derive", counted_derive)
        engine.graph.run = counted_run  # type: ignore[method-assign]
        engine.generate(requests)
    assert_captured_alike(make_config(pair, drafter, 4, "catchup", options=options), "step_replay", requests)
