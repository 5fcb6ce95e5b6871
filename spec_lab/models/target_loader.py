"""Loads a target from a checkpoint or with random weights, as its family requires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from spec_lab.checkpoints.checkpoint import OwnTensors, open_tensors
from spec_lab.checkpoints.checkpoint_files import LazyTensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.keep_narrow import FP8, INT4, MXFP4, NarrowForm, with_narrow_products, with_wide_products
from spec_lab.checkpoints.random_weights import random_tensors
from spec_lab.checkpoints.target_tensors import counts_from_one, target_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.models.decoder import Decoder, DecoderTarget
from spec_lab.models.gemma4 import Gemma4Target
from spec_lab.models.partition import WHOLE, Partition

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]
KEPT_IN: Mapping[str, NarrowForm | torch.dtype] = {
    "fp8": FP8,
    "int4": INT4,
    "mxfp4": MXFP4,
    "bfloat16": torch.bfloat16,
}
"""What weights are rounded to, by `target.weight_dtype`."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The source of a target's weights, and the form in which they are stored.

    Attributes:
        folder: a checkpoint; None for random weights.
        partition: which share of each tensor is kept.
        kept_in: what weights are rounded to; None for `dtype`. A `NarrowForm` applies to the products of layers. A CPU
            has no such products, so there the rounded weights are stored in `dtype`. bfloat16 applies to all matrices.
            They are stored in `dtype` too, and kernels=native packs them in 16 bits.
    """

    folder: Path | None
    dtype: torch.dtype
    device: torch.device
    partition: Partition = WHOLE
    seed: int = 0
    kept_in: NarrowForm | torch.dtype | None = None

    def read(
        self, shapes: Shapes, own: OwnTensors = dict, in_float32: Callable[[str], bool] = lambda name: False
    ) -> Tensors:
        """Read or randomly draw tensors of these names and shapes.

        `own` is as in `open_tensors`. `in_float32` tells which drawn tensors are float32, as `own` does for those read.
        """
        tensors: Tensors
        form = self.kept_in
        narrow = form if isinstance(form, NarrowForm) else None
        if self.folder is None:
            tensors = random_tensors(shapes, self.dtype, self.device, self.seed, self.partition, in_float32)
        else:
            tensors = open_tensors(
                self.folder, shapes, self.dtype, self.device, slices=self.partition, own=own, narrow=narrow
            )
        if form is None:
            return tensors
        if not isinstance(form, NarrowForm):
            return with_rounded_matrices(tensors, form)
        tensors = with_narrow_products(tensors, form)
        return with_wide_products(tensors, form, self.dtype) if self.device.type == "cpu" else tensors


def with_rounded_matrices(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Round matrices to the values of a narrower type, each when it is read. Norms and biases are not rounded."""

    def read(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return tensor.to(dtype).to(tensor.dtype) if tensor.ndim == 2 else tensor

    return LazyTensors(tensors.keys(), read)


def read_target(config: ModelConfig, source: WeightSource) -> Tensors:
    """Read the tensors of a decoder, alone or as part of a multimodal model, or draw them."""
    shapes = decoder_tensor_shapes(config)
    is_hybrid = config.family == "hybrid"
    in_float32 = counts_from_one if is_hybrid else lambda name: False
    return source.read(shapes, lambda stored: target_tensors(stored, config), in_float32)


def load_target(
    config: ModelConfig,
    source: WeightSource,
    backend: AttentionBackend,
    max_positions: int,
    kernels: KernelSet = TORCH_FORMS,
) -> Decoder:
    """Make a target, and replace each part by that of `products` as soon as it is made.

    Raises:
        UserError: the checkpoint does not match its config, or `source.partition` cannot split it.
    """
    for plan in config.layers:
        source.partition.share(plan)  # refuse what cannot be split before reading it
    target = DecoderTarget if config.gemma4 is None else Gemma4Target
    return target(config, read_target(config, source), backend, max_positions, source.partition, kernels)
