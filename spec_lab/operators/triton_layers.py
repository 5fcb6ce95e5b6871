"""kernels=triton computes forwards of up to 16 rows with `spec_kernels`, in six launches per layer of a Llama.

One of the six merges the splits of attention, if keys are split. Norms of heads take a seventh (Qwen3). In layers of
`triton_rows_are_invariant`, a row's result then does not depend, bit for bit, on the number of rows. With 17 to 64
rows, our products are used where they were faster than the library's: in MLPs, and for large weights outside attention
(`_with_our_products` has exceptions). More rows are left to the library, since arithmetic rather than bytes is then the
bound. All this is for row_invariant=true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spec_kernels.product_tiles import INVARIANT_ROWS, MAX_ROWS
from spec_lab.core.passes import Pass
from spec_lab.models.draft_parts import LikeliestToken
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.latent import LatentAttention, NarrowQuery
from spec_lab.models.layer_stack import Layer
from spec_lab.models.layers import AddPart, AddThenNorm, Attention, DecoderLayer, Mixer
from spec_lab.models.linear import GatedMLP, Linear
from spec_lab.models.norms import RowsPart, WeightedNorm
from spec_lab.models.sandwich import NormedLinear, PerLayerEmbedding, Sandwich, SandwichParts
from spec_lab.operators.promises import has_dense_mlp
from spec_lab.operators.prompt_rounding import are_few
from spec_lab.operators.triton_drafting import FusedLikeliest
from spec_lab.operators.triton_experts import AddExperts, ResidualExperts, fits_few_rows
from spec_lab.operators.triton_linear import (
    AddMLP,
    AddProduct,
    SkinnyLinear,
    SkinnyMLP,
    SkinnyProduct,
    TritonAddThenNorm,
    TritonNorm,
    dense,
)
from spec_lab.operators.triton_mixers import NarrowLatentAttention, SkinnyQuery, few_rows_mixer, sharing_inputs
from spec_lab.operators.triton_sandwich import TritonPerLayerEmbedding, triton_sandwich

AddHalf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TwoWays:
    """A layer with two implementations. For few rows, products apply the norms to their input. For many rows there are
    the library's products, with kernels between them. The MLP's products are ours up to 64 rows.

    Attributes:
        max_rows: the largest number of rows that counts as few. The rows that enter the layer are counted, so that
            results do not depend on rows being dropped inside it.
    """

    few: DecoderLayer
    many: DecoderLayer
    max_rows: int

    @property
    def mixer(self) -> object:
        return self.many.mixer

    def __call__(self, stream: torch.Tensor, at: Pass, rows: torch.Tensor | None = None) -> torch.Tensor:
        way = self.few if are_few(stream, self.max_rows) else self.many
        return way(stream, at, rows)


class TritonParts:
    """Makes the parts of models that run in Triton, for rows in 16 bits.

    Without row invariance the library makes the products of attention and MLPs, and its rounding depends on the number
    of rows. The kernels between the products are the same.
    """

    def __init__(self, row_invariant: bool) -> None:
        self._few = INVARIANT_ROWS if row_invariant else 0
        self._max_rows = MAX_ROWS if row_invariant else 0

    def linear(self, linear: Linear) -> Linear:
        return SkinnyLinear(dense(linear), self._max_rows)

    def layer(self, layer: DecoderLayer) -> Layer:
        """Replace a layer that norms inputs. Latent attention needs row invariance and norms that round before the
        weight is applied."""
        plan, close, mixer = layer.plan, layer.close, layer.mixer
        if not isinstance(close, AddThenNorm):
            return layer
        if not isinstance(mixer, LatentAttention):
            few = few_rows_mixer(layer)
        elif self._max_rows and not plan.float32_norms:
            mixer, both = sharing_inputs(mixer)
            few = NarrowLatentAttention(mixer, both, layer.norm)
        else:
            return layer
        first = AddProduct(SkinnyProduct(dense(close.product)))
        return TwoWays(
            replace(layer, norm=None, mixer=few, close=first, finish=self._few_finish(layer, close.norm)),
            self._many_rows(replace(layer, mixer=mixer), close),
            self._few,
        )

    def _few_finish(self, layer: DecoderLayer, norm: WeightedNorm) -> AddHalf:
        """Return the function that norms the stream of few rows and adds a layer's second half to it."""
        mlp = _mlp(layer)
        if isinstance(mlp, GatedMLP) and has_dense_mlp(layer.plan):
            return AddMLP(mlp, INVARIANT_ROWS, norm)
        if isinstance(mlp, ExpertMLP) and mlp.sizes.clamp is None and fits_few_rows(mlp.sizes):
            return ResidualExperts(mlp, norm)
        return AddPart(NormedLinear(TritonNorm.of(norm), mlp))

    def _many_rows(self, layer: DecoderLayer, close: AddThenNorm) -> DecoderLayer:
        mlp, finish = _mlp(layer), layer.finish
        if isinstance(mlp, GatedMLP) and has_dense_mlp(layer.plan):
            finish = AddMLP(mlp, self._max_rows)
        elif isinstance(mlp, ExpertMLP):
            finish = AddExperts(mlp)
        mixer, output = self._with_our_products(layer.mixer, close.product)
        norm = None if layer.norm is None else TritonNorm.of(layer.norm)
        return replace(layer, norm=norm, mixer=mixer, close=TritonAddThenNorm(output, close.norm), finish=finish)

    def _with_our_products(self, mixer: Mixer, output: Linear) -> tuple[Mixer, Linear]:
        """Use our products for up to 64 rows around latent attention, and for e4m3 weights, which the library would
        have to convert."""
        if isinstance(mixer, LatentAttention):
            query = mixer.query
            query = SkinnyQuery(query) if isinstance(query, NarrowQuery) else self.linear(query)
            return replace(mixer, query=query, row=self.linear(mixer.row)), self.linear(output)
        if isinstance(mixer, Attention) and getattr(mixer.qkv, "scales", None) is not None:
            return replace(mixer, qkv=self.linear(mixer.qkv)), self.linear(output)
        return mixer, output

    def shared_expert(self, mlp: GatedMLP) -> RowsPart:
        """Replace a shared expert without a gate, if rows are invariant."""
        return SkinnyMLP(mlp) if self._max_rows else mlp

    def likeliest(self, part: LikeliestToken) -> FusedLikeliest:
        return FusedLikeliest(part, self._max_rows)

    def sandwich(self, parts: SandwichParts) -> Sandwich:
        return triton_sandwich(parts, self._max_rows)

    def per_layer_embedding(self, part: PerLayerEmbedding) -> TritonPerLayerEmbedding:
        return TritonPerLayerEmbedding(part, self.linear(part.projection), TritonNorm.of(part.norm))


def _mlp(layer: DecoderLayer) -> RowsPart:
    """Return the part that a torch layer's second half adds."""
    assert isinstance(layer.finish, AddPart)
    return layer.finish.part
