"""Quantised matrices in folders of safetensors, widened when they are read: compressed-tensors, AWQ, GPTQ and fp8.

Only weights are widened. What a file says of activations or of a KV cache in fewer bits does not apply here. fp8 with
a scale for each block is DeepSeek-V3's: a matrix `X.weight` of float8_e4m3fn has its scales in `X.weight_scale_inv`.
Despite that name, values are multiplied by them (README_WEIGHTS.md of DeepSeek-V3). Blocks at the lower and right edges
may be incomplete: a matrix of 576 rows has 4.5 blocks of 128. So the block size comes from config.json.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spec_kernels.block_fp8_reference import BLOCK_SIZE
from spec_lab.checkpoints.checkpoint_files import StoredTensor, checkpoint_files, tensors_of
from spec_lab.checkpoints.expert_checkpoint import Mxfp4Experts
from spec_lab.checkpoints.gguf import quantizations
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.json_input import read_json, refuse_values
from spec_lab.checkpoints.keep_narrow import FP8, MXFP4, SCALES, SCALES_SUFFIX, NarrowForm, is_product, of_each_row
from spec_lab.checkpoints.widening import awq, gptq, narrow_numbers, nvfp4, packed_integers, scaled_blocks
from spec_lab.core.errors import UserError

PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
"""The types of tensors in a checkpoint that is not quantised."""
OF_SCALES = {"weight_scale", "scales", SCALES}
"""The parts that every quantised matrix has one of."""
NUMBERS = ("weight", "weight_scale", "weight_zero_point")
NOT_OF_WEIGHTS = (".input_scale", ".output_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized")
METHODS = ("compressed-tensors", "awq", "gptq", "fp8")
OF_GPT_OSS = "mxfp4"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """How the matrices of some modules are stored.

    Attributes:
        name: for the record.
        parts: the ends of the names of a matrix's parts, of which the last ones may be missing.
        widen: from the parts, in this order, to the matrix.
        shape: from their shapes to its own.
    """

    name: str
    parts: tuple[str, ...]
    widen: Callable[..., torch.Tensor]
    shape: Callable[..., Shape] = lambda values, *others: values


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Widens an fp8 matrix [rows, columns] to float32; each block of it has a scale."""

    rows: int
    columns: int

    def __call__(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scaled_blocks(values, scales.float(), (self.rows, self.columns))

    def shape(self, values: Shape, scales: Shape, *, name: str) -> Shape:
        """Return the shape of the matrix, and refuse scales of another number of blocks; `name` is theirs."""
        if scales != (-(-values[0] // self.rows), -(-values[1] // self.columns)):
            raise UserError(
                f"{name} is {list(scales)}, which does not fit {list(values)} in blocks of "
                f"{[self.rows, self.columns]}; take weights and config.json from the same checkpoint"
            )
        return values


def with_quantised(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Replace the parts of each quantised matrix by the matrix `X.weight`, which is widened when it is read.

    Raises:
        UserError: a scheme, or an option of one, that is not read.
    """
    if all(tensor.dtype in PLAIN for tensor in stored.values()):
        return dict(stored)
    options, source = _options(folder), f"{folder / 'config.json'} (quantization_config)"
    result = {name: tensor for name, tensor in stored.items() if not name.endswith(NOT_OF_WEIGHTS)}
    if not options or options.get("quant_method") == OF_GPT_OSS:
        return result
    refuse_values(source, {"quant_method": str(options.get("quant_method"))}, {"quant_method": METHODS})
    matrices: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in result.items():
        module, _, part = name.rpartition(".")
        matrix, scaled = f"{module}.weight", name.removesuffix(SCALES_SUFFIX)
        if f"{scaled}{SCALES_SUFFIX}" in result:  # a matrix with scales may have any name
            matrix, part = scaled, "weight" if name == scaled else SCALES
        matrices.setdefault(matrix, {})[part] = tensor
    for name, parts in matrices.items():
        if OF_SCALES & parts.keys():
            form = _form_of(name.removesuffix(".weight"), options, source)
            used = [parts[part] for part in itertools.takewhile(parts.__contains__, form.parts)]
            if len(used) < 2:
                continue  # scales of another method
            for tensor in used:
                del result[tensor.name]
            shape = form.shape(*(tensor.shape for tensor in used))
            result[name] = used[0].made(form.widen, *used[1:], name=name, shape=shape, dtype="BF16")
    return result


def with_products_as_stored(stored: Mapping[str, StoredTensor], narrow: NarrowForm) -> dict[str, StoredTensor]:
    """Keep fp8 products of layers, or MXFP4 experts, as they are in the file, with their scales as separate tensors
    (`keep_narrow`).

    Raises:
        UserError: a block width that no kernel here supports.
    """
    result: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        result[name], blocks = tensor, tensor.form
        if isinstance(blocks, Mxfp4Experts) and narrow is MXFP4:
            codes, exponents = tensor.parts
            result[name] = codes.made(blocks.codes, shape=tensor.shape)
            result[f"{name}{SCALES_SUFFIX}"] = exponents.made(blocks.in_order)
        if isinstance(blocks, Fp8Blocks) and narrow is FP8 and is_product(name):
            assert tensor.part is None, "a split target in e4m3 is refused earlier"
            refuse_values(str(tensor.file), {"inputs in a block": blocks.columns}, {"inputs in a block": (BLOCK_SIZE,)})
            weight, scales = tensor.parts
            rows = partial(of_each_row, block_rows=blocks.rows, num_rows=tensor.shape[0])
            result[name] = replace(weight, kept=torch.float8_e4m3fn)
            result[f"{name}{SCALES_SUFFIX}"] = scales.made(rows, kept=torch.float32)
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
    if options["quant_method"] == OF_GPT_OSS:
        return [OF_GPT_OSS]
    if "config_groups" in options:
        return [_of_group(group, options, source).name for group in options["config_groups"].values()]
    return [_form_of("", options, source).name]


def _options(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    options: dict[str, Any] = config.get("quantization_config") or {}
    return options or (config.get("text_config") or {}).get("quantization_config") or {}


def _form_of(module: str, options: Mapping[str, Any], source: str) -> Form:
    """Return the form of a module's matrix."""
    method = options["quant_method"]
    if method == "awq":
        return _awq(options, source)
    if method == "gptq":
        return _gptq(options, source)
    if method == "fp8" and (block := options.get("weight_block_size")):
        blocks = Fp8Blocks(*block)
        shape = partial(blocks.shape, name=f"{source}: {module}.{SCALES}")
        return Form(f"fp8 in blocks of {blocks.rows} x {blocks.columns}", ("weight", SCALES), blocks, shape)
    if method == "fp8":
        return Form("fp8 by tensor", NUMBERS, narrow_numbers)
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
    strategies = "tensor", "channel", "group", "tensor_group", "block"
    refuse_values(source, weights, {"actorder": (False, "weight", "static"), "strategy": strategies})
    of_groups = f"in groups of {size}" if size > 0 else f"by {weights.get('strategy') or 'tensor'}"
    name = f"{form} {weights['type']}{bits} {of_groups}"
    if form == "nvfp4-pack-quantized":
        return Form(name, ("weight_packed", "weight_scale", "weight_global_scale"), nvfp4, partial(_wider, factor=2))
    if form == "pack-quantized":
        refuse_values(source, weights, {"num_bits": (4, 8)})
        widen, shape = partial(packed_integers, bits=bits), partial(_wider, factor=32 // bits)
        return Form(name, ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"), widen, shape)
    refuse_values(source, weights, {"num_bits": (8,)})
    block = weights.get("block_structure")
    return Form(name, NUMBERS, narrow_numbers if block is None else partial(scaled_blocks, block=tuple(block)))


def _awq(options: Mapping[str, Any], source: str) -> Form:
    values = {**options, "version": str(options.get("version") or "gemm").lower()}
    refuse_values(source, values, {"version": ("gemm",), "bits": (4,), "zero_point": (True,)})
    name = f"awq int4 in groups of {options.get('group_size')}"
    return Form(name, ("qweight", "qzeros", "scales"), awq, lambda words, *others: (words[1] * 8, words[0]))


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
    parts = "qweight", "qzeros", "scales", "g_idx"
    return Form(name, parts, widen, lambda words, *others: (words[1], words[0] * 32 // bits))


def _wider(shape: Shape, *others: Shape, factor: int) -> Shape:
    return *shape[:-1], shape[-1] * factor
