"""This module holds what a run loads once, and the sizes of its caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.assembly import registry
from spec_lab.assembly.attention_loader import BackendContext
from spec_lab.assembly.devices import has_cuda
from spec_lab.assembly.kernels import KERNELS, Kernels
from spec_lab.assembly.memory import room_for
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import Rollback, RunConfig, WeightDtype, Weights
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, CacheRow, PagedKVCache
from spec_lab.core.protocols import AttentionBackend
from spec_lab.core.types import Request
from spec_lab.engine.experts_read import ExpertsRead
from spec_lab.errors import UserError
from spec_lab.models.config import ModelConfig
from spec_lab.models.decoder import Decoder
from spec_lab.models.delta_caches import DeltaCache
from spec_lab.models.delta_sizes import DeltaNetSizes
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.families.table import read_model_config
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.plan import LayerPlan
from spec_lab.models.target_loader import WeightSource, load_target
from spec_lab.workloads.thinking import THINKING_MARKERS
from spec_lab.workloads.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine's caches.

    Attributes:
        max_seq_len: longest prompt plus output.
        margin: positions past it that a round may write: 2K of a chain, and N more where the host runs a round behind
            and the device does not end requests.
        max_kv_len: the longest committed length at the start of a round.
        num_rows: rows of a request in verify.
        rollback: how layers that keep a state take some of them back.
    """

    num_slots: int
    max_seq_len: int
    margin: int
    page_size: int
    num_pages: int
    max_kv_len: int
    num_rows: int = 1
    rollback: Rollback = Rollback.checkpoints

    def one_sequence(self) -> Limits:
        """Sizes for one sequence at a time, as long as the longest."""
        num_pages = _num_pages(self.max_seq_len + self.margin, self.page_size) + NUM_RESERVED_PAGES
        return dataclasses.replace(self, num_slots=1, num_pages=num_pages)


@dataclass(frozen=True, slots=True)
class Models:
    """The models and the backend, which are loaded once and shared by every engine of a run.

    Attributes:
        kernels: what computes the small steps of a round.
        experts_read: counts for the layers of experts, the target's and the drafter's.
        markers: of the thinking phase; None when the tokenizer has none.
    """

    target: Decoder
    backend: AttentionBackend
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    experts_read: ExpertsRead
    markers: ThinkingMarkers | None = None

    @property
    def row_invariant(self) -> bool:
        """Tell whether a row of a forward of the target, of up to 16, is bit for bit the same whatever the others."""
        return self.invariant_rows > 1

    @property
    def invariant_rows(self) -> int:
        """The most rows of a forward of the target of which each is, bit for bit, what it would be alone.

        It is 1 where nothing is promised.
        """
        products, plans = self.kernels.products, self.target.layer_plans
        by_products = (
            getattr(self.backend, "row_invariant", False)
            and self.target.used_products
            and all(products.is_row_invariant(plan) for plan in plans)
        )
        by_layers = all(getattr(layer, "row_invariant", False) for layer in self.target.layers)
        return products.invariant_rows if by_products or by_layers else 1

    def adopt(self, parts: Iterable[ExpertMLP]) -> None:
        """Let the run's kernels compute these routers and experts, and count what they read."""
        adopted = tuple(parts)
        for part in adopted:
            part.router = part.router.made_by(self.kernels.router)
            part.experts = part.experts.made_by(self.kernels.experts)
        self.experts_read.watch(adopted)


def target_folder(config: RunConfig) -> Path:
    """Finds the folder of the target's checkpoint."""
    return registry.of(config).target(config).folder(config.target)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and has_cuda():
            raise UserError("device=auto: there is a GPU, and this torch cannot use it; use device=cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={name}: this torch sees no CUDA device; use device=cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "float16" and device.type == "cpu":
        raise UserError("dtype=float16 is for a GPU, and this run is on the CPU; use dtype=float32 or device=cuda")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def engine_limits(config: RunConfig, requests: list[Request], num_draft_tokens: int) -> Limits:
    """Sizes that hold `batch_size` of the longest requests, unless the cache group says otherwise.

    Raises:
        UserError: the longest request does not fit into the target's positions.
    """
    longest = max(requests, key=_num_tokens)
    target = read_model_config(target_folder(config))
    num_positions = target.max_position_embeddings
    if _num_tokens(longest) > num_positions:
        raise UserError(
            f"request {longest.request_id} of {len(longest.prompt_ids)} prompt and {longest.max_new_tokens} new "
            f"tokens: {_num_tokens(longest)} tokens are longer than the target's {num_positions} positions; "
            "lower max_new_tokens, use shorter prompts, or leave such prompts out with workload.unusable=skip"
        )
    _refuse_sparse_attention(target, longest, _reach(config, num_draft_tokens))
    max_seq_len = config.cache.max_seq_len or _num_tokens(longest)
    num_late_rows = num_draft_tokens + 1 if overlaps(config) and not sees_ends(config) else 0
    margin = _reach(config, num_draft_tokens) + num_late_rows
    page_size = config.cache.page_size
    num_slots = min(config.batch_size, len(requests))
    pages_each = _num_pages(max_seq_len + margin, page_size)
    num_pages = config.cache.num_pages or pages_each * num_slots + NUM_RESERVED_PAGES
    return Limits(num_slots, max_seq_len, margin, page_size, num_pages, max_seq_len + num_late_rows)


def _refuse_sparse_attention(target: ModelConfig, longest: Request, reach: int) -> None:
    limit, needed = target.max_dense_positions, _num_tokens(longest) + reach
    if limit is not None and needed > limit:
        raise UserError(
            f"request {longest.request_id}: prompt, output and drafts are {needed} tokens, and past {limit} "
            "(index_topk) the target attends chosen keys alone, which is not supported; lower max_new_tokens or use "
            "shorter prompts"
        )


def _reach(config: RunConfig, num_draft_tokens: int) -> int:
    """Positions past its last token that a request's round may write: 2K of a chain, K + 1 of them by verify.

    The branches of a tree lie side by side: verify writes a slot a row, and a drafter one a branch and level.
    """
    sizes = tree_sizes(config)
    if sizes is None:
        return 2 * num_draft_tokens
    return max(sizes.num_rows, sizes.depth + (sizes.depth - 1) * sizes.width, 2 * sizes.depth)


def overlaps(config: RunConfig) -> bool:
    """Tells whether the host runs a round behind; only some graph modes can."""
    return bool(getattr(config.graph, "overlap", False))


def sees_ends(config: RunConfig) -> bool:
    """Tells whether the device ends requests, so that no round begins behind an end that the host has not read yet."""
    return bool(getattr(config.graph, "rounds_per_replay", 1) > 1)


def _num_tokens(request: Request) -> int:
    return len(request.prompt_ids) + request.max_new_tokens


def _num_pages(num_positions: int, page_size: int) -> int:
    return -(-num_positions // page_size)


def thinking_markers(tokenizer: Tokenizer) -> ThinkingMarkers | None:
    """The ids of the thinking markers, in the first spelling that the tokenizer knows; None where it knows none."""
    for pair in THINKING_MARKERS:
        begin, end = map(tokenizer.special_id, pair)
        if begin is not None and end is not None:
            return ThinkingMarkers(begin, end)
    return None


def load_models(
    config: RunConfig, max_seq_len: int, markers: ThinkingMarkers | None = None, partition: Partition = WHOLE
) -> Models:
    """Load what `partition` keeps of the target.

    Raises:
        UserError: the checkpoint is not what it should be, too short for `max_seq_len`, or cannot be split.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cuda":
        # cuDNN plans its attention anew for every shape, and a growing cache has a new one in every round.
        torch.backends.cuda.enable_cudnn_sdp(False)
    folder = target_folder(config)
    model_config = read_model_config(folder)
    if max_seq_len > model_config.max_position_embeddings:
        raise UserError(
            f"cache.max_seq_len={max_seq_len} is longer than the target's {model_config.max_position_embeddings} "
            "positions; use cache.max_seq_len=null"
        )
    if model_config.keeps_states and tree_sizes(config) is not None:
        raise UserError(
            f"tree={config.tree.name}: layers of the target keep a state, which branches cannot share ({folder}); "
            "use tree=none"
        )
    # Draft positions may pass the end; they are clamped onto the last row of the table.
    max_positions = min(model_config.max_position_embeddings, max_seq_len + 2 * 16)
    kernels = KERNELS[config.kernels](device, dtype, config.row_invariant)
    context = BackendContext(
        config.cache.page_size, max_positions, device, dtype, kernels.rope_write, kernels.torch_attention
    )
    attention = registry.of(config).attention(config)
    make_backend = attention.make if tree_sizes(config) is None else attention.make_for_trees
    assert make_backend is not None, "a backend that masks no trees is refused one"
    backend = make_backend(context)
    _refuse_backend_without_latents(config, model_config, backend)
    if backend.latent is not None:
        backend.latent.expect(config.batch_size)
    checkpoint = None if config.target.weights == Weights.random else folder
    is_fp8 = config.target.weight_dtype == WeightDtype.fp8
    source = WeightSource(checkpoint, dtype, device, partition, config.seed, is_fp8)
    target = load_target(model_config, source, backend, max_positions)
    if partition is WHOLE:
        target.use(kernels.products)
    models = Models(target, backend, kernels, device, dtype, ExpertsRead(device, config.batch_size), markers)
    models.adopt(target.expert_parts)
    for net in target.delta_nets:
        net.use(kernels.delta.steps)
    return models


def _refuse_backend_without_latents(config: RunConfig, target: ModelConfig, backend: AttentionBackend) -> None:
    """Refuse it before any weight is read."""
    if any(plan.latent is not None for plan in target.layers) and backend.latent is None:
        raise UserError(
            f"attention={config.attention.name} has no latent attention (MLA), which the target needs; use "
            "attention=torch"
        )


def cache_row(plan: LayerPlan) -> CacheRow | None:
    """Says what the cache of a layer holds of one token; None for a layer that keeps a state instead."""
    if plan.delta_net is not None:
        return None
    if plan.latent is not None:
        return CacheRow((plan.latent.row_width,), plan.kv_owner)
    return CacheRow((2, plan.num_kv_heads, plan.head_dim), plan.kv_owner)


def build_cache(plans: Sequence[LayerPlan], limits: Limits, models: Models) -> PagedKVCache:
    """A cache of `limits.num_pages` pages for layers of these plans; UserError when the device has no room for it."""
    rows = [cache_row(plan) for plan in plans]
    nets = {index: plan.delta_net for index, plan in enumerate(plans) if plan.delta_net is not None}
    item_size = models.dtype.itemsize
    row_sizes = (prod(row.shape) for row in rows if row is not None and row.owner is None)
    num_bytes = limits.num_pages * limits.page_size * sum(row_sizes) * item_size
    what = f"a cache of cache.num_pages={limits.num_pages} pages of {limits.page_size} tokens"
    if nets:
        num_bytes += (limits.num_slots + 1) * sum(_slot_bytes(net, limits, item_size) for net in nets.values())
        what += f", and of {limits.num_slots} slots with states (recurrent.rollback={limits.rollback}),"
    with room_for(num_bytes, what, models.device):
        recurrent = {index: _delta_cache(net, limits, models) for index, net in nets.items()}
        return PagedKVCache(rows, limits.num_pages, limits.page_size, models.dtype, models.device, recurrent)


def _slot_bytes(net: DeltaNetSizes, limits: Limits, item_size: int) -> int:
    checkpoints = limits.rollback == Rollback.checkpoints
    return (net.checkpoint_bytes if checkpoints else net.replay_bytes)(limits.num_rows, item_size)


def _delta_cache(net: DeltaNetSizes, limits: Limits, models: Models) -> DeltaCache[Any]:
    delta = models.kernels.delta
    make = delta.checkpoints if limits.rollback == Rollback.checkpoints else delta.replay
    return make(net, limits.num_slots, limits.num_rows, models.dtype, models.device)
