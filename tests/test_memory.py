"""The memory of a run: what is watched, and that weights are in it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.native.packing import Layout, pack, unpack
from spec_kernels.native.parts import NativeProduct
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf import gguf_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.measure.memory import MemoryWatch
from spec_lab.models.decoder import DecoderTarget
from spec_lab.models.linear import PackedLinear
from spec_lab.operators.native_parts import NativeLinear
from spec_lab.operators.native_set import native_set
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


@pytest.mark.parametrize("num_rows", [0, 1, 128, 129, 300])
def test_a_row_of_many_has_the_bits_that_it_has_alone(num_rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    linear = NativeLinear(NativeProduct(torch.randn(70, 33, generator=draw), torch.randn(70, generator=draw)))
    rows = torch.randn(num_rows, 33, generator=draw)
    together = linear(rows)
    assert together.shape == (num_rows, 70)
    assert all(torch.equal(together[index], linear(rows[index : index + 1])[0]) for index in range(num_rows))
    assert torch.allclose(together, torch.nn.functional.linear(rows, linear.dense_weight(), linear.bias), atol=1e-5)


def test_an_opened_tensor_is_read_when_it_is_asked_for_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_target(tmp_path / "folder", "llama", num_hidden_layers=2)
    path = write_gguf(tmp_path / "model.gguf", model)
    read: list[str] = []
    kind = type(next(iter(gguf_tensors(path).values())))
    whole = kind.read
    monkeypatch.setattr(kind, "read", lambda tensor: read.append(tensor.place.name) or whole(tensor))
    for source in (path, tmp_path / "folder"):
        tensors = open_tensors(source, decoder_tensor_shapes(read_model_config(source)), torch.float32, "cpu")
        name = "model.norm.weight"
        assert name in tensors and len(tensors) == len(list(tensors)) and "no" not in tensors
        assert tensors.get("no") is None
        assert tensors[name] is not tensors[name]
        assert torch.equal(tensors[name], model.state_dict()[name])
    assert read == ["output_norm.weight"] * 3


def weights_of(part: Any) -> list[Any]:
    """The packed products of the library that are reachable from a part of a model."""
    seen, found, waiting = set(), [], [part]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, torch.Tensor, str)):
            continue
        seen.add(id(one))
        found += [one] if isinstance(one, PackedLinear) else []
        inside = one if isinstance(one, (list, tuple)) else []
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        waiting += [*inside, *(getattr(one, name) for name in slots if hasattr(one, name))]
        waiting += list(getattr(one, "__dict__", {}).values())
    return found


def test_kernels_in_c_leave_no_weight_of_the_library_behind(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    model = make_tiny_target(tmp_path, "llama", **sizes)
    config = read_model_config(tmp_path)
    tensors = open_tensors(tmp_path, decoder_tensor_shapes(config), torch.float32, "cpu")
    plain = DecoderTarget(config, tensors, TorchAttention(4, 64), 64)
    native = DecoderTarget(config, tensors, TorchAttention(4, 64), 64, kernels=native_set())
    assert len(weights_of(plain)) == 2 * 4 + 1
    assert weights_of(native) == []
    for target in (plain, native):
        assert torch.equal(target.head_weight, model.state_dict()["lm_head.weight"])
