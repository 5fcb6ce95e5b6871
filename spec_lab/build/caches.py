"""Makes the caches of an engine, with the sizes in its `Limits`: pages for keys and values, and the states of slots."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from spec_lab.build.limits import Limits
from spec_lab.build.memory import room_for
from spec_lab.build.models import Models
from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.config.choices import Rollback
from spec_lab.core.kv_cache import CacheRow, PagedKVCache
from spec_lab.core.types import AttentionKind
from spec_lab.models.delta_caches import DeltaCache


def cache_row(plan: LayerPlan) -> CacheRow | None:
    """Return what a layer's cache holds for one token; None for a layer that keeps a state instead."""
    if plan.delta_net is not None:
        return None
    if plan.latent is not None:
        return CacheRow((plan.latent.row_width,), plan.kv_owner)
    return CacheRow((2, plan.num_kv_heads, plan.head_dim), plan.kv_owner)


def attention_kinds(plans: Sequence[LayerPlan]) -> tuple[AttentionKind, ...]:
    """Return the different kinds of attention of layers with these plans."""
    rows = [(plan, row) for plan in plans if (row := cache_row(plan)) is not None]
    return tuple(
        dict.fromkeys(AttentionKind(row.shape, plan.window, plan.num_heads // plan.num_kv_heads) for plan, row in rows)
    )


def build_cache(plans: Sequence[LayerPlan], limits: Limits, models: Models) -> PagedKVCache:
    """Make a cache of `limits.num_pages` pages, with the states of its slots, for layers with these plans.

    Raises:
        UserError: the device has no room for it.
    """
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
        return PagedKVCache(
            rows,
            limits.num_pages,
            page_size=limits.page_size,
            dtype=models.dtype,
            device=models.device,
            recurrent=recurrent,
        )


def _slot_bytes(net: DeltaNetSizes, limits: Limits, item_size: int) -> int:
    checkpoints = limits.rollback == Rollback.checkpoints
    return (net.checkpoint_bytes if checkpoints else net.replay_bytes)(limits.num_rows, item_size)


def _delta_cache(net: DeltaNetSizes, limits: Limits, models: Models) -> DeltaCache[Any]:
    delta = models.kernels.delta
    make = delta.checkpoints if limits.rollback == Rollback.checkpoints else delta.replay
    return make(net, limits.num_slots, limits.num_rows, models.dtype, models.device)
