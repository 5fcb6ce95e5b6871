"""Says which forwards of pre-norm layers are launched with each kernel placed before the one in front of it has ended.

What a launch costs beside its bytes weighs most where a layer is many launches that read little: with experts, of which
few rows read a part, and with latent attention. Layers of Llama's kind gain less than 1 % on an H200 or lose by it
(docs/log/moe.md), and launch as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.models.products import Products

Launching = Callable[[int], AbstractContextManager[None]]
"""Gives the context in which a forward of so many rows is launched."""


def launching_of(products: Products, plans: Sequence[LayerPlan]) -> Launching:
    """Return that of forwards through such layers: a few rows of those with experts or latent attention are early.

    Forwards of 32 rows gained nothing, and layers that keep states have not been measured.
    """
    weighs = any(plan.experts is not None or plan.latent is not None for plan in plans)
    keeps_states = any(plan.delta_net is not None for plan in plans)
    most_rows = products.invariant_rows if weighs and not keeps_states else 0

    def launching(num_rows: int) -> AbstractContextManager[None]:
        return products.launching() if num_rows <= most_rows else nullcontext()

    return launching
