"""`Products` replaces parts of a model by faster ones, if the run's kernels have them; `PLAIN` replaces none."""

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
    """Each method that takes a part returns a faster replacement. Where there is none, torch computes the part.

    `plan` is the plan of the layer to which the part belongs.

    Attributes:
        invariant_rows: the most rows of a forward in which a row's bits may be independent of the others.
        prompt_rounding: if not `NO_ROUNDING`, makes a prompt's row get the same bits whatever rows share its forward,
            in layers for which `is_row_invariant` holds.
    """

    invariant_rows: int
    prompt_rounding: PromptRounding

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        """Return whether these products, in such a layer and for up to `invariant_rows` rows, make a row's bits
        independent of the others."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Return the context for forwards whose kernels may start early (programmatic dependent launch)."""
        ...

    def norm(self, norm: WeightedNorm) -> RowsPart: ...

    def linear(self, linear: Linear) -> Linear: ...

    def layer(self, parts: LayerParts, plan: LayerPlan) -> Layer: ...

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        """Replace the stack of all layers of a target; each layer comes from `layer`."""
        ...

    def draft_input(self, part: DraftInput) -> DraftInputs: ...

    def likeliest(self, part: LikeliestToken) -> Likeliest: ...

    def recurrent(self, parts: RecurrentParts, plan: LayerPlan) -> RecurrentKernels: ...

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest: ...

    def sandwich(self, parts: SandwichParts) -> Sandwich:
        """Replace the parts of a layer whose halves have a norm before and after."""
        ...

    def per_layer_embedding(self, part: PerLayerEmbedding) -> EmbedPerLayer: ...

    def logit_cap(self, part: LogitCap) -> CapLogits: ...


class PlainProducts:
    """Replaces nothing."""

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
    """Make a draft head by replacing each of its parts separately."""
    inputs, layer = products.draft_input(parts.inputs), products.layer(parts.layer, plan)
    run = HeadLayer(inputs, layer, parts.rotary, parts.residual_is_normed)
    return RecurrentKernels(products.linear(parts.fuse), run, products.likeliest(parts.likeliest), run)


SMALL_LAYER = 5120
"""The widest MLP of a small layer. Up to this width early launches gained 4 to 18 %, and -2 to 4 % at 8192
(docs/log/small_models.md)."""
Launching = Callable[[int], AbstractContextManager[None]]
"""Returns the context for a forward of the given number of rows."""


def launching_of(products: Products, plans: Sequence[LayerPlan]) -> Launching:
    """Decide which forwards through such layers use early launches: a kernel starts before the one before it has ended.

    They help if a layer consists of many launches that read little: layers with experts, layers with latent attention,
    and small layers. Larger layers like Llama's gain little or lose, so they do not use them. Forwards of 32 rows
    gained nothing. Layers that keep states have not been measured.
    """
    are_small = all(plan.is_plain and plan.intermediate_size <= SMALL_LAYER for plan in plans)
    weighs = are_small or any(plan.experts is not None or plan.latent is not None for plan in plans)
    keeps_states = any(plan.delta_net is not None for plan in plans)
    most_rows = products.invariant_rows if weighs and not keeps_states else 0

    def launching(num_rows: int) -> AbstractContextManager[None]:
        return products.launching() if num_rows <= most_rows else nullcontext()

    return launching
