"""Makes the caches of an engine, with the sizes in its `Limits`: pages for keys and values, and the states of slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

import torch

from spec_lab.build.limits import Limits
from spec_lab.build.models import Models
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.config.choices import CacheDtype, Rollback
from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.core.kv_cache import CacheRow, PagedKVCache
from spec_lab.core.types import AttentionKind
from spec_lab.models.delta_caches import CacheMaker, ReplayedUpdates, StateCheckpoints

GIBI = 2**30


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

    Linux gives a process more memory than there is, and kills it later, when it is used.

    Raises:
        UserError: it is larger than the device's memory, or latent rows were to be narrow.
    """
    rows = [cache_row(plan) for plan in plans]
    nets = {index: plan.delta_net for index, plan in enumerate(plans) if plan.delta_net is not None}
    item_size = models.dtype.itemsize
    is_narrow = kept_in is CacheDtype.fp8
    if is_narrow and any(plan.latent is not None for plan in plans):
        raise UserError("cache.dtype=fp8 is for keys and values, not latent attention (MLA); use cache.dtype=auto")
    row_sizes = (prod(row.shape) for row in rows if row is not None and row.owner is None)
    num_bytes = limits.num_pages * limits.page_size * sum(row_sizes) * (1 if is_narrow else item_size)
    what = f"a cache of cache.num_pages={limits.num_pages} pages of {limits.page_size} tokens"
    keeps_all = limits.rollback == Rollback.checkpoints
    if nets:
        for net in nets.values():
            bytes_of = net.checkpoint_bytes if keeps_all else net.replay_bytes
            num_bytes += (limits.num_slots + 1) * bytes_of(limits.num_rows, item_size)
        what += f", and of {limits.num_slots} slots with states (recurrent.rollback={limits.rollback}),"
    if num_bytes > (total := memory_of(models.device)):
        raise UserError(
            f"{what} needs {num_bytes / GIBI:.1f} GiB, {models.device} has {total / GIBI:.1f} GiB; use "
            "cache.num_pages=null and cache.page_size=16, or lower batch_size or max_new_tokens"
        )
    make = cache_maker(models.kernels, limits.rollback)
    recurrent = {
        index: make(net, limits.num_slots, limits.num_rows, models.dtype, models.device) for index, net in nets.items()
    }
    return PagedKVCache(
        rows,
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


def memory_of(device: torch.device) -> int:
    """Return the device's total memory in bytes, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
