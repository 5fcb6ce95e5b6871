"""A small target whose few rows go through the C of kernels=native, or through torch: what tests of both run."""

from __future__ import annotations

from dataclasses import replace

import torch

from spec_lab.attention.native_backend import NativeAttention
from spec_lab.build.caches import cache_row
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.random_weights import random_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.kept import ALL_ROWS, Kept
from spec_lab.core.kernel_set import KernelSet
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata, FeatureSpec, NormSide, TargetOutput
from spec_lab.engine.pages import PageTable
from spec_lab.models.decoder import DecoderTarget

PAGE_SIZE, MAX_POSITIONS = 4, 160
HIDDEN_SIZE = 49
"""No whole vectors, and an odd number: what C keeps behind such rows is aligned by itself or not at all."""
NUM_PAGES = 2 + 2 * MAX_POSITIONS // PAGE_SIZE
FEATURES = FeatureSpec(layer_inputs=(1,), final_hidden=NormSide.POST_NORM)
FULL = LayerPlan(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeConfig(1e4, "none"), intermediate_size=80)
PLANS = {
    "llama": FULL,
    "qwen3": replace(FULL, qk_norm=True, head_dim=80),
    "qwen2": replace(FULL, qkv_bias=True, num_kv_heads=1, head_dim=16),
    "window": replace(FULL, window=5, head_dim=32),
    "partial": replace(FULL, rope=RopeConfig(1e4, "none", partial_rotary_factor=0.5), mlp_bias=True, o_bias=True),
}


class Lane:
    """A target of two layers of one plan, its cache of two slots, and the backend that reads it."""

    def __init__(self, plan: LayerPlan, kernels: KernelSet, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype` is what the weights can be kept in without loss."""
        cpu = torch.device("cpu")
        self.backend = NativeAttention(PAGE_SIZE, MAX_POSITIONS)
        self.table = PageTable(2, MAX_POSITIONS, PAGE_SIZE, cpu)
        for slot in range(2):
            self.table.assign(slot, list(range(2 + slot, NUM_PAGES, 2)))
        self.cache = PagedKVCache([cache_row(plan)] * 2, NUM_PAGES, PAGE_SIZE, torch.float32, cpu)
        config = ModelConfig("llama", 70, HIDDEN_SIZE, 1e-5, MAX_POSITIONS, False, (plan, plan), (), None)
        tensors = random_tensors(decoder_tensor_shapes(config), torch.float32, cpu, 3)
        tensors = {name: 4 * t.to(dtype).float() for name, t in tensors.items()}
        self.target = DecoderTarget(config, tensors, self.backend, MAX_POSITIONS, kernels=kernels)

    def metadata(self, starts: list[int], num_queries: int) -> AttentionMetadata:
        first = torch.tensor(starts)
        positions = first.unsqueeze(1) + torch.arange(num_queries)
        pages = self.table.pages[: len(starts)]
        return self.backend.build(positions, first + num_queries, pages, max(starts) + num_queries)

    def slots(self, slot: int, start: int) -> torch.Tensor:
        """Return the cache slots of a slot's positions from `start` on."""
        positions = torch.arange(start, MAX_POSITIONS)
        return self.table.pages[slot][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def run(self, starts: list[int], tokens: torch.Tensor, kept: Kept | None = None) -> TargetOutput:
        """Run [requests, rows] tokens behind `starts`."""
        metadata = self.metadata(starts, tokens.shape[1])
        features = FEATURES if kept is None else FeatureSpec()
        return self.target.forward(tokens.flatten(), Pass(self.cache, metadata, kept or ALL_ROWS), features)


def tokens_of(num_requests: int, num_rows: int) -> torch.Tensor:
    return torch.randint(70, (num_requests, num_rows), generator=torch.Generator().manual_seed(5))


def assert_alike(expected: torch.Tensor, got: torch.Tensor) -> None:
    assert got.shape == expected.shape and got.isfinite().all()
    assert (got - expected).norm() <= 2e-5 * expected.norm()
