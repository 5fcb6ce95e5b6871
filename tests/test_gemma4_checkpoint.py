"""Reading the tensors of Gemma 4 checkpoints: what is left out without a word, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.models.decoder import Decoder
from spec_lab.models.target_loader import WeightSource, load_target
from tests.tiny_gemma4 import KINDS, POSITIONS, make_tiny_gemma4

pytest.importorskip("transformers.models.gemma4")


def load(folder: Path, random: bool = False) -> Decoder:
    source = WeightSource(None if random else folder, torch.float32, torch.device("cpu"))
    return load_target(read_model_config(folder), source, TorchAttention(4, POSITIONS), POSITIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_are_those_that_transformers_saves(tmp_path: Path, kind: str) -> None:
    """None is left over and none is missing; the head is the embedding."""
    model = make_tiny_gemma4(tmp_path, kind)
    shapes = decoder_tensor_shapes(read_model_config(tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert shapes == expected


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_random_weights_of_every_kind(tmp_path: Path, kind: str) -> None:
    """Scales and norms are ones, so that a stream neither dies nor grows."""
    make_tiny_gemma4(tmp_path, kind)
    tensors = WeightSource(None, torch.float32, torch.device("cpu")).read(
        decoder_tensor_shapes(read_model_config(tmp_path))
    )
    ones = {name for name, tensor in tensors.items() if bool((tensor == 1).all())}
    assert ones == {name for name, tensor in tensors.items() if tensor.dim() == 1}
    assert load(tmp_path, random=True).embedding.shape == (96, 32)
