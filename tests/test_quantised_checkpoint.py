"""Quantised folders: each matrix has the bits that the format's library or its formula gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spec_lab
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.quantised import stored_types
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.choices import WeightDtype
from spec_lab.measure.runner import weights_in_words
from tests.tiny_checkpoints import make_tiny_target, refused, rewrite_config
from tests.tiny_experts import make_tiny_experts
from tests.tiny_quantised import Parts, compressed, config_of, quantise, split, words

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}
DYNAMIC = {"dynamic": True, "strategy": "token"}
E4M3 = torch.float8_e4m3fn
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any], torch.dtype]] = {
    "int4": ("pack-quantized", INT4, {}, torch.bfloat16),
    "int4_asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, {}, torch.float16),
    "int8_channel": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {}, torch.float32),
    "fp8_dynamic": (
        "float-quantized",
        FP8 | {"strategy": "channel"},
        {"dynamic": True, "strategy": "token"},
        torch.bfloat16,
    ),
    "fp8_static": ("float-quantized", FP8 | {"strategy": "tensor"}, {"strategy": "tensor"}, torch.float32),
    "fp8_block": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 32]}, {}, torch.bfloat16),
    "int8_dynamic": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {}, torch.bfloat16),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
        {},
        torch.bfloat16,
    ),
}


RUN = [
    *("target=hf", "drafter=none", "references=[]", "repeats=1", "profile_rounds=0", "warmup_requests=0", "device=cpu"),
    *("workload=random_ids", "workload.limit=1", "max_new_tokens=4"),
]


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
        tmp_path,
        dtype=torch.float32,
        trust_remote_code=False,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    theirs, ours = model.state_dict(), read(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    changed = [name for name in ours if not torch.equal(ours[name], plain[name])]
    assert len(changed) == 2 * 7 and all(name.endswith("_proj.weight") for name in changed)
    worst = max(float((ours[name] - plain[name]).abs().max()) for name in changed)
    assert worst < 0.2  # of matrices whose numbers are about 1 / 8


def numbers(*shape: int, bits: int = 4) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape)


def awq_parts(expected: dict[str, torch.Tensor], dtype: torch.dtype) -> Parts:
    """w[row, input] = (q - z) * s, by groups of inputs; word n has rows 8n + 0 2 4 6 1 3 5 7 from its lowest bits on
    (AutoAWQ's `WQLinear_GEMM`)."""

    def parts_of(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, inputs = weight.shape
        size, order = min(32, inputs), [0, 2, 4, 6, 1, 3, 5, 7]
        q, z, s = (
            numbers(inputs, rows),
            numbers(inputs // size, rows),
            (torch.rand(inputs // size, rows) / 50).to(dtype),
        )
        group = torch.arange(inputs) // size
        expected[module] = ((q - z[group]).to(dtype) * s[group]).T.float()
        stored = (words(part.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for part in (q, z))
        return dict(zip(("qweight", "qzeros"), stored, strict=True)) | {"scales": s}

    return parts_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_awq_is_its_formula(dtype: torch.dtype, tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama", **SIZES)
    expected: dict[str, torch.Tensor] = {}
    quantise(tmp_path, AWQ, awq_parts(expected, dtype))
    ours = read(tmp_path)
    assert len(expected) == 14 and all(torch.equal(ours[f"{name}.weight"], value) for name, value in expected.items())


def test_experts_of_four_bits_are_stacked(tmp_path: Path) -> None:
    make_tiny_experts(tmp_path, "qwen3_moe")
    expected: dict[str, torch.Tensor] = {}
    quantise(tmp_path, AWQ, awq_parts(expected, torch.float16))
    ours, prefix = read(tmp_path), "model.layers.2.mlp.experts."
    assert len(expected) == 4 * (4 + 8 * 3)
    for expert in range(8):
        gate, up, down = (expected[f"{prefix}{expert}.{part}_proj"] for part in ("gate", "up", "down"))
        assert torch.equal(ours[f"{prefix}gate_up_proj"][expert], torch.cat((gate, up)))
        assert torch.equal(ours[f"{prefix}down_proj"][expert], down)


@pytest.mark.parametrize(
    ("bits", "group_size", "form", "shuffled"),
    [
        (4, 32, "gptq", False),
        (4, 32, "gptq", True),
        (8, 32, "gptq_v2", True),
        (4, -1, None, False),
        (2, 32, "gptq", False),
    ],
)
def test_gptq_is_its_formula(bits: int, group_size: int, form: str | None, shuffled: bool, tmp_path: Path) -> None:
    """w[row, input] = (q - z) * s, by groups that g_idx names; the first format stores z - 1 modulo 2^bits."""
    make_tiny_target(tmp_path, "llama", **SIZES)
    expected = {}

    def parts_of(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, inputs = weight.shape
        size = inputs if group_size < 0 else group_size
        count, group = inputs // size, torch.arange(inputs) // size
        group = group[torch.randperm(inputs)] if shuffled else group
        q, z = numbers(inputs, rows, bits=bits), numbers(count, rows, bits=bits)
        z[0, :2] = torch.tensor([0, 2**bits - 1])
        s = (torch.rand(count, rows) / 50).half()
        expected[module] = ((q - z[group]).half() * s[group]).T.float()
        less = z if form == "gptq_v2" else (z - 1) % 2**bits
        parts = {"qweight": words(q.T, bits).T, "qzeros": words(less, bits), "scales": s}
        return parts | ({"g_idx": group.int()} if shuffled or group_size < 0 else {})

    options = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": shuffled, "sym": False}
    quantise(tmp_path, options | ({} if form is None else {"checkpoint_format": form}), parts_of)
    ours = read(tmp_path)
    assert len(expected) == 14 and all(torch.equal(ours[f"{name}.weight"], value) for name, value in expected.items())


def test_a_part_does_not_take_the_place_of_a_missing_one(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama", **SIZES)

    def without_zeros(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, inputs = weight.shape
        return {
            "qweight": torch.zeros(inputs // 8, rows, dtype=torch.int32),
            "scales": torch.ones(inputs // 32, rows).half(),
            "g_idx": (torch.arange(inputs) // 32).int(),
        }

    quantise(tmp_path, GPTQ, without_zeros)
    with refused("not expected", "scales"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt' is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits 3 is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (COMPRESSED | {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized' is not supported"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask' is not supported"),
    ],
)
def test_an_unknown_scheme_is_refused_by_its_name(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama", **SIZES)
    quantise(tmp_path, options, lambda module, weight: {"qweight": weight.int(), "scales": weight})
    with refused(str(tmp_path), reason):
        read(tmp_path)
    rewrite_config(tmp_path, drop=("quantization_config",))
    with refused("not expected"):
        read(tmp_path)


def test_each_group_of_a_mixed_file_has_its_own_form(tmp_path: Path) -> None:
    """By a name of the module, else by its class; and its parts may lie in several files."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    make_tiny_target(tmp_path, "llama", **SIZES)
    plain, made = read(tmp_path), {}
    for target, case in (("re:.*self_attn.*", "fp8_dynamic"), ("Linear", "int4")):
        form, weights, _, dtype = SCHEMES[case]
        args = quantization.QuantizationArgs(**weights)
        scheme = quantization.QuantizationScheme(targets=[target], weights=args, format=form)
        made[target] = config_of(scheme, form), compressed(scheme, form, dtype)
    groups = {target: options["config_groups"]["group_0"] for target, (options, _) in made.items()}
    options = made["Linear"][0] | {"config_groups": groups, "format": "mixed-precision"}

    def parts_of(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = made["re:.*self_attn.*" if "self_attn" in module else "Linear"][1](module, weight)
        return parts | {"input_scale": torch.ones(1)}

    quantise(tmp_path, options, parts_of)
    whole = read(tmp_path)
    split(tmp_path)
    assert all(torch.equal(value, whole[name]) for name, value in read(tmp_path).items())
    for projection, least, most in (("self_attn.q_proj", 0.01, 0.04), ("mlp.up_proj", 0.05, 0.15)):
        name = f"model.layers.1.{projection}.weight"
        assert least < float((whole[name] - plain[name]).norm() / plain[name].norm()) < most
    assert stored_types(tmp_path) == ["float-quantized float8 by channel", "pack-quantized int4 in groups of 32"]


@pytest.mark.parametrize(("shape", "options"), [((), {}), ((1,), {"activation_scheme": "static"})])
def test_fp8_with_one_scale_for_a_matrix(shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    """As AutoFP8 and vLLM's llm-compressor of old wrote it; the scale of activations is not read."""
    make_tiny_target(tmp_path, "llama", **SIZES)
    expected = {}

    def parts_of(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = (weight.abs().max() / 448).reshape(shape)
        narrow = (weight / scale).to(E4M3)
        expected[module] = narrow.float() * scale
        return {"weight": narrow, "weight_scale": scale, "input_scale": torch.ones(shape)}

    quantise(tmp_path, {"quant_method": "fp8", **options}, parts_of)
    ours = read(tmp_path)
    assert len(expected) == 14 and all(torch.equal(ours[f"{name}.weight"], value) for name, value in expected.items())
    assert stored_types(tmp_path) == ["fp8 by tensor"]


def test_a_run_of_a_quantised_target_says_from_what(tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target", "llama", **SIZES)
    rewrite_config(tmp_path / "target", quantization_config={"quant_method": "modelopt"})  # that of its source
    assert stored_types(tmp_path / "target") is None

    def parts_of(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": (weight / scale).to(E4M3), "weight_scale": scale}

    group = {"targets": ["Linear"], "weights": FP8 | {"strategy": "channel"}}
    options = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    quantise(tmp_path / "target", options, parts_of)
    run = [f"target.path={tmp_path / 'target'}", f"output_dir={tmp_path}", *RUN]
    wide = "float32, widened from float-quantized float8 by channel"
    assert spec_lab.run(spec_lab.compose(run)).run.target.weights == wide
    narrow = spec_lab.run(spec_lab.compose([*run, "target.weight_dtype=int4"])).run.target.weights
    assert narrow == f"int4, rounded when read from {wide}"
    assert weights_in_words(WeightDtype.fp8, "bfloat16", ["fp8 in blocks of 128 x 128"]).startswith("fp8, as stored")
