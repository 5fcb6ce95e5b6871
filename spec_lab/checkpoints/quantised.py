"""Quantised matrices in folders of safetensors, widened when they are read: compressed-tensors, AWQ and GPTQ.

Only weights are widened. What a file says of activations or of a KV cache in fewer bits does not apply here. fp8 in
blocks is read by `block_fp8`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.checkpoint_files import Packed, StoredTensor, checkpoint_files, tensors_of
from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.gguf import quantizations
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.json_input import read_json
from spec_lab.checkpoints.quantization import read_block
from spec_lab.checkpoints.widening import awq, gptq, narrow_numbers, nvfp4, packed_integers, scaled_blocks

PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
"""The types of tensors in a checkpoint that is not quantised."""
PARTS = frozenset(
    {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale"}
    | {"qweight", "qzeros", "scales", "g_idx"}
)
NOT_OF_WEIGHTS = (".input_scale", ".output_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized")
METHODS = ("compressed-tensors", "awq", "gptq", "fp8")

STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Form:
    """How the matrices of some modules are stored.

    Attributes:
        name: for the record.
        shape: from the shapes of a matrix's parts to its own.
    """

    name: str
    widen: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    shape: Callable[[Shapes], tuple[int, ...]]


def with_quantised(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Replace the parts of each quantised matrix by the matrix `X.weight`, which is widened when it is read.

    Raises:
        UserError: a scheme, or an option of one, that is not read.
    """
    if all(tensor.dtype in PLAIN for tensor in stored.values()):
        return dict(stored)
    options, source = _options(folder), f"{folder / 'config.json'} (quantization_config)"
    result = {name: tensor for name, tensor in stored.items() if not name.endswith(NOT_OF_WEIGHTS)}
    if not options or _is_read_elsewhere(options):
        return result
    refuse_values(source, {"quant_method": str(options.get("quant_method"))}, {"quant_method": METHODS})
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in result.items():
        module, _, part = name.rpartition(".")
        if part in PARTS:
            modules.setdefault(module, {})[part] = tensor
    for module, parts in modules.items():
        if len(parts) > 1:
            form = _form_of(module, options, source)
            for of_matrix in parts.values():
                del result[of_matrix.name]
            whole = form.shape({part: tensor.shape for part, tensor in parts.items()})
            first, name = next(iter(parts.values())), f"{module}.weight"
            result[name] = StoredTensor(first.file, name, whole, "BF16", packed=Packed(parts, form.widen))
    return result


def stored_types(path: Path) -> list[str] | None:
    """Return in what types or forms the matrices of a checkpoint are stored; None for a folder that is not quantised.

    Those of a GGUF file are in order, the one with the most numbers first.
    """
    if is_gguf(path):
        return quantizations(path)
    kinds = {tensor.dtype for file in checkpoint_files(path) for tensor in tensors_of(file).values()}
    options, source = _options(path), str(path / "config.json")
    if kinds <= PLAIN or not options:
        return None
    block = read_block({"quantization_config": options})
    if block is not None:
        return [f"fp8 in blocks of {block[0]} x {block[1]}"]
    if _is_read_elsewhere(options):
        return [options["quant_method"]]
    if "config_groups" in options:
        return [_of_group(group, options, source).name for group in options["config_groups"].values()]
    return [_form_of("", options, source).name]


def _options(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    options: dict[str, Any] = config.get("quantization_config") or {}
    return options or (config.get("text_config") or {}).get("quantization_config") or {}


def _is_read_elsewhere(options: Mapping[str, Any]) -> bool:
    """Return whether `block_fp8`, or the reader of gpt-oss, reads the matrices."""
    return read_block({"quantization_config": options}) is not None or options.get("quant_method") == "mxfp4"


def _form_of(module: str, options: Mapping[str, Any], source: str) -> Form:
    """Return the form of a module's matrix."""
    method = options["quant_method"]
    if method == "awq":
        return _awq(options, source)
    if method == "gptq":
        return _gptq(options, source)
    if method == "fp8":
        return Form("fp8 by tensor", narrow_numbers, _as_stored)
    groups: list[Mapping[str, Any]] = list(options["config_groups"].values())
    named = (group for group in groups if any(_is_named(module, target) for target in group["targets"]))
    by_class = (group for group in groups if any(target.isidentifier() for target in group["targets"]))
    return _of_group(next(itertools.chain(named, by_class)), options, source)


def _is_named(module: str, target: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _of_group(group: Mapping[str, Any], options: Mapping[str, Any], source: str) -> Form:
    """Return the form of a group of compressed-tensors' config."""
    weights, form = group["weights"], group.get("format") or options.get("format")
    bits, size = weights["num_bits"], weights.get("group_size") or -1
    others = {
        "format": form,
        "sparsity_config.format": (options.get("sparsity_config") or {}).get("format"),
        "transform_config": options.get("transform_config") or None,
    }
    refuse_values(source, others, {"format": FORMATS, "sparsity_config.format": ("dense",), "transform_config": ()})
    refuse_values(source, weights, {"actorder": (False, "weight", "static"), "strategy": STRATEGIES})
    of_groups = f"in groups of {size}" if size > 0 else f"by {weights.get('strategy') or 'tensor'}"
    name = f"{form} {weights['type']}{bits} {of_groups}"
    if form == "nvfp4-pack-quantized":
        return Form(name, nvfp4, lambda shapes: _wider(shapes["weight_packed"], 2))
    if form == "pack-quantized":
        refuse_values(source, weights, {"num_bits": (4, 8)})
        widen = partial(packed_integers, bits=bits)
        return Form(name, widen, lambda shapes: _wider(shapes["weight_packed"], 32 // bits))
    refuse_values(source, weights, {"num_bits": (8,)})
    block = weights.get("block_structure")
    if block is not None:
        return Form(name, partial(scaled_blocks, block=tuple(block)), _as_stored)
    return Form(name, narrow_numbers, _as_stored)


def _awq(options: Mapping[str, Any], source: str) -> Form:
    values = {**options, "version": str(options.get("version") or "gemm").lower()}
    refuse_values(source, values, {"version": ("gemm",), "bits": (4,), "zero_point": (True,)})
    name = f"awq int4 in groups of {options['group_size']}"
    return Form(name, awq, lambda shapes: (shapes["qweight"][1] * 8, shapes["qweight"][0]))


def _gptq(options: Mapping[str, Any], source: str) -> Form:
    values = {
        **options,
        "checkpoint_format": options.get("checkpoint_format") or options.get("format"),
        "dynamic": options.get("dynamic") or None,
    }
    supported: dict[str, tuple[Any, ...]] = {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2")}
    refuse_values(source, values, supported | {"dynamic": (), "is_marlin_format": (False,)})
    bits, size = options["bits"], options.get("group_size", -1)
    off_by_one = values["checkpoint_format"] != "gptq_v2"
    widen = partial(gptq, bits=bits, group_size=size, zeros_off_by_one=off_by_one)
    name = f"gptq int{bits} " + (f"in groups of {size}" if size > 0 else "by channel")
    return Form(name, widen, lambda shapes: (shapes["qweight"][1], shapes["qweight"][0] * 32 // bits))


def _as_stored(shapes: Shapes) -> tuple[int, ...]:
    return shapes["weight"]


def _wider(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    return *shape[:-1], shape[-1] * factor
