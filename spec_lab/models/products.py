"""`Products` gives a model faster parts where an option has them; `PLAIN` leaves each as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.prompts import NO_ROUNDING, PromptRounding
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.draft_parts import (
    DraftInput,
    DraftInputs,
    HeadLayer,
    Likeliest,
    LikeliestToken,
    RecurrentKernels,
    RecurrentParts,
)
from spec_lab.models.layer_stack import Layer, LayerStack, Stack
from spec_lab.models.layers import DecoderLayer, LayerParts
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RowsPart, WeightedNorm
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, LogitCap, PerLayerEmbedding, Sandwich, SandwichParts


class Products(Protocol):
    """Gives a faster part for one of a model, or the same where it has none.

    `plan` is that of the layer the part belongs to: it says what kind the part is of.

    Attributes:
        invariant_rows: the most rows of a forward that `is_row_invariant` speaks of.
        prompt_rounding: how the rows of prompts round alike, through layers of which it says so.
    """

    invariant_rows: int
    prompt_rounding: PromptRounding

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        """Tell whether a row of such a layer does not depend on the others, of up to `invariant_rows`."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Return the context in which a forward is launched whose kernels may be placed early."""
        ...

    def norm(self, norm: WeightedNorm) -> RowsPart: ...

    def linear(self, linear: Linear) -> Linear: ...

    def layer(self, parts: LayerParts, plan: LayerPlan) -> Layer: ...

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        """Give all layers of a target, each of which is one that `layer` gave."""
        ...

    def draft_input(self, part: DraftInput) -> DraftInputs: ...

    def likeliest(self, part: LikeliestToken) -> Likeliest: ...

    def recurrent(self, parts: RecurrentParts, plan: LayerPlan) -> RecurrentKernels: ...

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest: ...

    def sandwich(self, parts: SandwichParts) -> Sandwich:
        """Give those of a layer whose halves are normed before and after."""
        ...

    def per_layer_embedding(self, part: PerLayerEmbedding) -> EmbedPerLayer: ...

    def logit_cap(self, part: LogitCap) -> CapLogits: ...


class PlainProducts:
    """Leaves every part as it is."""

    invariant_rows = 1
    prompt_rounding = NO_ROUNDING

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        return False

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def norm(self, norm: WeightedNorm) -> RowsPart:
        return norm

    def linear(self, linear: Linear) -> Linear:
        return linear

    def layer(self, parts: LayerParts, plan: LayerPlan) -> Layer:
        return DecoderLayer.of(parts)

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        return stack

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return part

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return part

    def recurrent(self, parts: RecurrentParts, plan: LayerPlan) -> RecurrentKernels:
        return recurrent_by_parts(self, parts, plan)

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest:
        return part

    def sandwich(self, parts: SandwichParts) -> Sandwich:
        return parts

    def per_layer_embedding(self, part: PerLayerEmbedding) -> EmbedPerLayer:
        return part

    def logit_cap(self, part: LogitCap) -> CapLogits:
        return part


PLAIN = PlainProducts()


def recurrent_by_parts(products: Products, parts: RecurrentParts, plan: LayerPlan) -> RecurrentKernels:
    """Make a draft head part by part."""
    inputs, layer = products.draft_input(parts.inputs), products.layer(parts.layer, plan)
    run = HeadLayer(inputs, layer, parts.rotary, parts.residual_is_normed)
    return RecurrentKernels(products.linear(parts.fuse), run, products.likeliest(parts.likeliest), run)


SMALL_LAYER = 5120
"""Early launches gained 4 to 18 % where MLPs are no wider, and -2 to 4 % at 8192 (docs/log/small_models.md)."""
Launching = Callable[[int], AbstractContextManager[None]]
"""Gives the context in which a forward of so many rows is launched."""


def launching_of(products: Products, plans: Sequence[LayerPlan]) -> Launching:
    """Say which forwards through such layers have each kernel placed before the one in front of it has ended.

    What a launch costs beside its bytes weighs most where a layer is many launches that read little: with experts, of
    which few rows read a part, with latent attention, and where a whole layer is small. Larger layers of Llama's kind
    gain less than 1 % on an H200 or lose by it (docs/log/moe.md), and launch as ever. Forwards of 32 rows gained
    nothing, and layers that keep states have not been measured.
    """
    are_small = all(plan.is_plain and plan.intermediate_size <= SMALL_LAYER for plan in plans)
    weighs = are_small or any(plan.experts is not None or plan.latent is not None for plan in plans)
    keeps_states = any(plan.delta_net is not None for plan in plans)
    most_rows = products.invariant_rows if weighs and not keeps_states else 0

    def launching(num_rows: int) -> AbstractContextManager[None]:
        return products.launching() if num_rows <= most_rows else nullcontext()

    return launching
