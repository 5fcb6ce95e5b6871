"""Helpers that look into the caches of layers with a state, for each way of keeping it."""

from __future__ import annotations

from typing import Any

from spec_lab.models.delta_caches import ReplayedUpdates, StateCheckpoints, StateEachRowSlots

JUNK = 1e4
KEPT: dict[str, Any] = {"checkpoints": StateCheckpoints, "replay": ReplayedUpdates}
"""The caches by the value of `recurrent.rollback`."""


def spoil_unread(cache: Any, slot: int, row: int, history: int = 3) -> None:
    """Fill what the next round of a slot whose committed row is `row` has no business to read."""
    windows = cache.windows.inputs[slot]
    windows[:row], windows[row + history :] = JUNK, JUNK
    if isinstance(cache, StateEachRowSlots):
        cache.states[slot, :row], cache.states[slot, row + 1 :] = JUNK, JUNK
        return
    for part in (cache.keys, cache.values, cache.log_decay, cache.strength):
        part[slot, row + 1 :] = JUNK
