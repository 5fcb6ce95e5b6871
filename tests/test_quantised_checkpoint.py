"""Quantised folders: each matrix has the bits that the format's library or its formula gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.quantised import quantised_from
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from tests.tiny_checkpoints import make_tiny_target, refused, rewrite_config
from tests.tiny_quantised import compressed, config_of, quantise, words

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any], torch.dtype]] = {
    "int4": ("pack-quantized", INT4, {}, torch.bfloat16),
    "int4_asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, {}, torch.float16),
    "int8_channel": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {}, torch.float32),
    "fp8_dynamic": ("float-quantized", FP8 | {"strategy": "channel"}, {"dynamic": True, "strategy": "token"}, torch.bfloat16),
    "fp8_static": ("float-quantized", FP8 | {"strategy": "tensor"}, {"strategy": "tensor"}, torch.float32),
    "fp8_block": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 32]}, {}, torch.bfloat16),
    "int8_dynamic": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {}, torch.bfloat16),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        {},
        torch.bfloat16,
    ),
}
NAMES = ("pack-quantized int4 in groups of 32", "float-quantized float8 by channel")


def read(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(open_tensors(folder, decoder_tensor_shapes(read_model_config(folder)), dtype, "cpu"))


@pytest.mark.parametrize("case", SCHEMES)
def test_compressed_tensors_are_what_transformers_computes_with(case: str, tmp_path: Path) -> None:
    """Its `dequantize=True` is the library's own decompression, cast to the model's type."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    form, weights, inputs, dtype = SCHEMES[case]
    make_tiny_target(tmp_path, "llama", **SIZES)
    plain = read(tmp_path)
    activations = quantization.QuantizationArgs(**FP8 | inputs) if inputs else None
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights), input_activations=activations, format=form
    )
    quantise(tmp_path, config_of(scheme, form), compressed(scheme, form, dtype))
    there: Any = AutoModelForCausalLM
    model = there.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    theirs, ours = model.state_dict(), read(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    changed = [name for name in ours if not torch.equal(ours[name], plain[name])]
    assert len(changed) == 2 * 7 and all(name.endswith("_proj.weight") for name in changed)
    worst = max(float((ours[name] - plain[name]).abs().max()) for name in changed)
    assert worst < 0.2  # of matrices whose numbers are about 1 / 8


def test_the_record_says_from_what(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert quantised_from(tmp_path) == []
