"""Decides which forwards of a model use early launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kernel_set import KernelSet, Op

SMALL_LAYER = 5120
"""The widest MLP of a small layer. Up to this width early launches gained 4 to 18 %, and -2 to 4 % at 8192
(docs/log/small_models.md)."""
Launching = Callable[[int], AbstractContextManager[None]]
"""Returns the context for a forward of the given number of rows."""


def launching_of(kernels: KernelSet, plans: Sequence[LayerPlan]) -> Launching:
    """Decide which forwards through such layers use early launches: a kernel starts before the one before it has ended.

    They help if a layer consists of many launches that read little: layers with experts, layers with latent attention,
    and small layers. Larger layers like Llama's gain little or lose, so they do not use them. Forwards of 32 rows
    gained nothing. Layers that keep states have not been measured.
    """
    are_small = all(plan.is_plain and plan.intermediate_size <= SMALL_LAYER for plan in plans)
    weighs = are_small or any(plan.experts is not None or plan.latent is not None for plan in plans)
    keeps_states = any(plan.delta_net is not None for plan in plans)
    most_rows = kernels.invariant_rows if weighs and not keeps_states else 0

    early: Callable[[], AbstractContextManager[None]] = kernels.get(Op.EARLY_LAUNCHES, nullcontext)

    def launching(num_rows: int) -> AbstractContextManager[None]:
        return early() if num_rows <= most_rows else nullcontext()

    return launching
