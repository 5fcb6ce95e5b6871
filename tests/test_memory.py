"""The memory of a run: what is watched, and that weights are in it once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_kernels.native.packing import Layout, pack, unpack
from spec_lab.checkpoints import gguf
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.measure.memory import MemoryWatch
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_gguf import write_gguf

CPU = torch.device("cpu")
MANY = 2**26


def test_a_watch_sees_a_peak_that_has_gone_and_none_from_before_it() -> None:
    first = MemoryWatch.begin()
    torch.ones(MANY, dtype=torch.uint8)
    seen = first.read(CPU)
    assert seen["peak_rss_bytes"] >= seen["start_rss_bytes"] + MANY // 2
    assert seen["peak_cuda_bytes"] is None
    later = MemoryWatch.begin().read(CPU)
    assert later["peak_rss_bytes"] < seen["peak_rss_bytes"]


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (64, 32), (130, 70), (4160, 33), (9000, 16)])
def test_panels_are_read_back_as_they_were(shape: tuple[int, int], has_tiles: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for exact, layout in ((weight, Layout.FLOATS), (weight.bfloat16().float(), Layout(1 + has_tiles))):
        panels, found = pack(exact, has_tiles)
        assert found is layout
        assert torch.equal(unpack(panels, found, *shape), exact)


def test_an_opened_tensor_is_read_when_it_is_asked_for_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_target(tmp_path / "folder", "llama", num_hidden_layers=2)
    path = write_gguf(tmp_path / "model.gguf", model)
    read: list[str] = []
    whole = gguf.dequantised
    monkeypatch.setattr(gguf, "dequantised", lambda file, place: read.append(place.name) or whole(file, place))
    for source in (path, tmp_path / "folder"):
        tensors = open_tensors(source, decoder_tensor_shapes(read_model_config(source)), torch.float32, "cpu")
        name = "model.norm.weight"
        assert name in tensors and len(tensors) == len(list(tensors)) and "no" not in tensors
        assert tensors.get("no") is None
        assert tensors[name] is not tensors[name]
        assert torch.equal(tensors[name], model.state_dict()[name])
    assert read == ["output_norm.weight"] * 3
