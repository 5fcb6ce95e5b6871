"""`Products` gives a model faster parts where an option has them; `PLAIN` leaves each as it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.protocols import DraftStart, DraftSteps
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.layers import DecoderLayer, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.replaceable_parts import (
    Body,
    DraftInput,
    DraftInputs,
    DraftLayer,
    DraftLayers,
    Layer,
    LayerBody,
    LayerStack,
    Likeliest,
    LikeliestToken,
    Stack,
)
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, SandwichParts


class Products(Protocol):
    """Gives a faster part for one of a model, or the same where it has none.

    `plan` is that of the layer the part belongs to: it says what kind the part is of.

    Attributes:
        invariant_rows: the most rows of a forward that `is_row_invariant` speaks of.
    """

    invariant_rows: int

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        """Tell whether a row of such a layer does not depend on the others, of up to `invariant_rows`."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Return the context in which a forward is launched whose kernels may be placed early."""
        ...

    def norm(self, norm: RowsPart) -> RowsPart: ...

    def linear(self, linear: Linear) -> Linear: ...

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer: ...

    def body(self, body: LayerBody, plan: LayerPlan) -> Body: ...

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        """Give all layers of a target, each of which is one that `layer` gave."""
        ...

    def draft_input(self, part: DraftInput) -> DraftInputs: ...

    def draft_layer(self, part: DraftLayer, plan: LayerPlan) -> DraftLayers:
        """Give a draft head's layer, of parts that `draft_input` and `body` gave."""
        ...

    def likeliest(self, part: LikeliestToken) -> Likeliest: ...

    def draft_start(self, fuse: Linear, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftStart | None:
        """Give what runs a head's catch-up step at once, of what `linear`, `draft_layer` and `likeliest` gave; None
        where its parts are run one by one."""
        ...

    def draft_steps(self, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftSteps | None:
        """Give what runs a head's steps at once, of what `draft_layer` and `likeliest` gave; None where each is run
        for itself."""
        ...

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest: ...

    def sandwich(self, parts: SandwichParts) -> SandwichParts:
        """Give those of a layer whose halves are normed before and after."""
        ...

    def per_layer_embedding(self, part: EmbedPerLayer) -> EmbedPerLayer: ...

    def logit_cap(self, part: CapLogits) -> CapLogits: ...


class PlainProducts:
    """Leaves every part as it is."""

    invariant_rows = 1

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        return False

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def norm(self, norm: RowsPart) -> RowsPart:
        return norm

    def linear(self, linear: Linear) -> Linear:
        return linear

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        return layer

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        return body

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        return stack

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return part

    def draft_layer(self, part: DraftLayer, plan: LayerPlan) -> DraftLayers:
        return part

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return part

    def draft_start(self, fuse: Linear, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftStart | None:
        return None

    def draft_steps(self, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftSteps | None:
        return None

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest:
        return part

    def sandwich(self, parts: SandwichParts) -> SandwichParts:
        return parts

    def per_layer_embedding(self, part: EmbedPerLayer) -> EmbedPerLayer:
        return part

    def logit_cap(self, part: CapLogits) -> CapLogits:
        return part


PLAIN = PlainProducts()
