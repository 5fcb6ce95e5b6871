"""Makes the caches of an engine, with the sizes in its `Limits`: pages for keys and values, and the states of slots."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.build.limits import Limits
from spec_lab.build.models import Models
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.config.choices import CacheDtype, Rollback
from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.core.kv_cache import CacheRow, PagedKVCache
from spec_lab.core.types import AttentionKind
from spec_lab.models.delta_caches import CacheMaker, ReplayedUpdates, StateCheckpoints


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


def build_cache(plans: Sequence[LayerPlan], limits: Limits, models: Models, kept_in: CacheDtype) -> PagedKVCache:
    """Make a cache of `limits.num_pages` pages, with the states of its slots, for layers with these plans.

    `kept_in` is the type of keys and values.

    Raises:
        UserError: latent rows were to be narrow.
    """
    is_narrow = kept_in is CacheDtype.fp8
    if is_narrow and any(plan.latent is not None for plan in plans):
        raise UserError("cache.dtype=fp8 is for keys and values, not latent attention (MLA); use cache.dtype=auto")
    make = cache_maker(models.kernels, limits.rollback)
    recurrent = {
        index: make(plan.delta_net, limits.num_slots, limits.num_rows, models.dtype, models.device)
        for index, plan in enumerate(plans)
        if plan.delta_net is not None
    }
    return PagedKVCache(
        [cache_row(plan) for plan in plans],
        limits.num_pages,
        page_size=limits.page_size,
        dtype=models.dtype,
        device=models.device,
        recurrent=recurrent,
        is_narrow=is_narrow,
    )


def cache_maker(kernels: KernelSet, rollback: Rollback) -> CacheMaker:
    """Choose the class of the states of gated delta nets."""
    if rollback == Rollback.checkpoints:
        return kernels.get(Op.STATE_CHECKPOINTS, StateCheckpoints)
    return kernels.get(Op.REPLAYED_UPDATES, ReplayedUpdates)
