"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) over the paged cache.

Each head's key and value are linear maps of the token's latent row. For a few rows these maps are absorbed: the key map
is applied to the query instead, and the value map after attention. So all heads attend to one cached row for each
token. For the many rows of a prompt it is cheaper to unfold the keys and values of all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from spec_lab.checkpoints.plan import LatentSizes
from spec_lab.core.errors import UserError
from spec_lab.core.latent_protocols import LatentAttentionBackend, LatentKernels
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass, RotaryRows
from spec_lab.core.ragged import in_even_batches
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.partition import WHOLE, Partition


@dataclass(frozen=True, slots=True)
class NarrowQuery:
    """Makes queries through a narrow, normed bottleneck. It implements the protocol `Linear`."""

    narrow: Linear
    norm: RMSNorm
    widen: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.widen(self.norm(self.narrow(rows)))


@dataclass(slots=True)
class LatentAttention:
    """Attention over latent rows.

    All rows write their latent row. For rows that are dropped before attention, nothing else is computed.

    Attributes:
        query: the product from layer inputs to queries, in torch a `NarrowQuery` if it has a bottleneck.
        row: that from layer inputs to cache rows.
        norm: applies to the latent numbers of a cache row, not to its rotated key.
        key_map: [num_heads, qk_nope_head_dim, kv_lora_rank] maps a query into the space of latent numbers.
        value_map: [num_heads, kv_lora_rank, v_head_dim] maps attended latent numbers to values.
        o: the product from heads to output.
    """

    query: Linear
    row: Linear
    norm: RMSNorm
    key_map: torch.Tensor
    value_map: torch.Tensor
    o: Linear
    sizes: LatentSizes
    backend: LatentAttentionBackend
    window: int | None = None

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        """Write the latent rows of all rows, and return the input of `o` for the kept rows; there must be at least
        one."""
        self.write(rows, at)
        attending, _ = at.kept.queries(rows, at.metadata)
        here = at.of_queries()
        return self.attended(self.query(attending), here)

    def attended(self, queries: torch.Tensor, at: Pass) -> torch.Tensor:
        """Attend with the queries of the attending rows, and return the input of `o`. The latent rows must already be
        written."""
        heads = queries.unflatten(-1, (-1, self.sizes.query_width))
        if self.sizes.unfolding_is_cheaper(at.metadata.num_queries, at.metadata.max_seq_len):
            values = at.kept.attended(self._attend_unfolded(heads, at))
        else:
            latents = self._attend_absorbed(self.absorb(heads, at.rotary), at)
            values = self.values(at.kept.attended(latents))
        return values.flatten(1)

    def written_and_attended(self, queries: torch.Tensor, projected: torch.Tensor, at: Pass) -> torch.Tensor:
        """Do `write_projected` and `attended`, for rows that all attend."""
        self.write_projected(projected, at)
        return self.attended(queries, at)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        """Write the latent rows of all rows. If a layer's output is not read, this is all it does."""
        self.write_projected(self.row(rows), at)

    def write_projected(self, projected: torch.Tensor, at: Pass) -> None:
        """Norm, rotate and write the output of `row`."""
        latent, key = projected.split((self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim), dim=-1)
        turned = at.rotary(key.unsqueeze(1)).squeeze(1)
        self.backend.write(at.cache, at.metadata, torch.cat((self.norm(latent), turned), dim=-1))

    def absorb(self, heads: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        """Map query heads [rows, num_heads, query_width] to queries of latent rows [rows, num_heads, row_width]."""
        plain, turning = self._parts(heads)
        return torch.cat((each_head(plain, self.key_map), rotary(turning)), dim=-1)

    def turned(self, heads: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        """Rotate query heads [rows, num_heads, query_width], which may be written over."""
        plain, turning = self._parts(heads)
        return torch.cat((plain, rotary(turning)), dim=-1)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Map attended latent numbers [rows, num_heads, kv_lora_rank] to values [rows, num_heads, v_head_dim]."""
        return each_head(latents, self.value_map)

    def _attend_unfolded(self, heads: torch.Tensor, at: Pass) -> torch.Tensor:
        queries, maps, scale = self.turned(heads, at.rotary), (self.key_map, self.value_map), self.sizes.scale
        return in_even_batches(
            lambda batch: self.backend.attend_unfolded(
                queries[batch.rows], at.cache, batch.metadata, self.window, *maps, scale
            ),
            at.metadata,
        )

    def _attend_absorbed(self, queries: torch.Tensor, at: Pass) -> torch.Tensor:
        sizes = self.sizes
        return in_even_batches(
            lambda batch: self.backend.attend(
                queries[batch.rows], at.cache, batch.metadata, self.window, sizes.kv_lora_rank, sizes.scale
            ),
            at.metadata,
        )

    def _parts(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the channels of query heads that are not rotated, and those that are."""
        plain, turning = heads.split((self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim), dim=-1)
        return plain, turning


@dataclass(slots=True, kw_only=True)
class FusedLatentAttention(LatentAttention):
    """Latent attention with kernels that norm, rotate and write. For a few rows, kernels also multiply by each head's
    maps."""

    kernels: LatentKernels

    def write_projected(self, projected: torch.Tensor, at: Pass) -> None:
        slots = at.metadata.slot_mapping
        self.kernels.write(at.cache.kv, projected, self.norm.weight, *at.rotary.flat, slots, self.norm.eps)

    def written_and_attended(self, queries: torch.Tensor, projected: torch.Tensor, at: Pass) -> torch.Tensor:
        is_unfolded = self.sizes.unfolding_is_cheaper(at.metadata.num_queries, at.metadata.max_seq_len)
        if is_unfolded or not 0 < len(queries) <= self.kernels.max_head_rows:
            return LatentAttention.written_and_attended(self, queries, projected, at)  # slots break `super()`
        heads = queries.unflatten(-1, (-1, self.sizes.query_width))
        absorbed = self.kernels.absorb_and_write(
            heads,
            self.key_map,
            *at.rotary.flat,
            at.cache.kv,
            projected,
            self.norm.weight,
            at.metadata.slot_mapping,
            self.norm.eps,
        )
        latents = self._attend_absorbed(absorbed, at)
        return self.values(at.kept.attended(latents)).flatten(1)

    def absorb(self, heads: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        sizes = self.sizes
        cos, signed_sin = rotary.flat
        if 0 < len(heads) <= self.kernels.max_head_rows:
            return self.kernels.multiply(heads, self.key_map, cos, signed_sin)
        queries = heads.new_empty((*heads.shape[:2], sizes.row_width))
        plain, latents = heads[..., : sizes.qk_nope_head_dim], queries[..., : sizes.kv_lora_rank]
        torch.bmm(plain.transpose(0, 1), self.key_map, out=latents.transpose(0, 1))
        self.kernels.turn(queries, heads, cos, signed_sin)
        return queries

    def turned(self, heads: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        self.kernels.turn(heads, heads, *rotary.flat)
        return heads

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        if 0 < len(latents) <= self.kernels.max_head_rows:
            return self.kernels.multiply(latents, self.value_map, None, None)
        values = latents.new_empty((*latents.shape[:2], self.sizes.v_head_dim))
        torch.bmm(latents.transpose(0, 1), self.value_map, out=values.transpose(0, 1))
        return values


def build_latent_attention(
    sizes: LatentSizes,
    num_heads: int,
    eps: float,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    window: int | None = None,
    partition: Partition = WHOLE,
) -> LatentAttention:
    """Build latent attention from Hugging Face names below `prefix` (ending in `self_attn.`).

    `eps` applies to all norms. transformers 5 always uses 1e-6 in the two inner norms. The engines (vLLM, SGLang,
    tokenspeed) use the eps of config.json there, and so does this code.

    Raises:
        UserError: the attention backend has no latent attention.
    """
    if backend.latent is None:
        raise UserError(
            "attention: this backend has no latent attention (MLA), which the model needs; use attention=torch"
        )
    row_order = _row_order(sizes, sizes.kv_lora_rank)
    row_bias = tensors.get(f"{prefix}kv_a_proj_with_mqa.bias")
    unfold = tensors[f"{prefix}kv_b_proj.weight"].unflatten(0, (num_heads, -1))
    key_map, value_map = unfold.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=1)
    kernels = backend.latent.kernels
    make = LatentAttention if kernels is None else partial(FusedLatentAttention, kernels=kernels)
    return make(
        query=_query(sizes, num_heads, eps, tensors, prefix),
        row=make_linear(
            tensors[f"{prefix}kv_a_proj_with_mqa.weight"][row_order],
            None if row_bias is None else row_bias[row_order],
        ),
        norm=RMSNorm(tensors[f"{prefix}kv_a_layernorm.weight"], eps),
        key_map=key_map.contiguous(),
        value_map=value_map.transpose(1, 2).contiguous(),
        o=partition.output(tensors[f"{prefix}o_proj.weight"], tensors.get(f"{prefix}o_proj.bias")),
        sizes=sizes,
        backend=backend.latent,
        window=window,
    )


def each_head(heads: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Multiply [rows, num_heads, in] by each head's matrix [num_heads, in, out], giving [rows, num_heads, out]."""
    return torch.bmm(heads.transpose(0, 1), maps).transpose(0, 1)


def _query(sizes: LatentSizes, num_heads: int, eps: float, tensors: Mapping[str, torch.Tensor], prefix: str) -> Linear:
    """Make the product for queries: a `NarrowQuery` if it has a bottleneck."""
    name = "q_proj" if sizes.q_lora_rank is None else "q_b_proj"
    heads = tensors[f"{prefix}{name}.weight"].unflatten(0, (num_heads, sizes.query_width))
    widen = make_linear(heads[:, _row_order(sizes, sizes.qk_nope_head_dim)].flatten(0, 1))
    if sizes.q_lora_rank is None:
        return widen
    narrow = make_linear(tensors[f"{prefix}q_a_proj.weight"], tensors.get(f"{prefix}q_a_proj.bias"))
    return NarrowQuery(narrow, RMSNorm(tensors[f"{prefix}q_a_layernorm.weight"], eps), widen)


def _row_order(sizes: LatentSizes, num_unrotated: int) -> torch.Tensor:
    """Return an order of a weight's rows that puts the rotated channels, which are the last, into the rotate-half
    layout.

    Rotary tables pair channel i with channel i + qk_rope_head_dim / 2. Scores do not change, since queries and keys are
    reordered alike.
    """
    rotated = torch.arange(sizes.qk_rope_head_dim)
    if sizes.interleaved:
        rotated = rotated.view(-1, 2).t().flatten()
    return torch.cat((torch.arange(num_unrotated), num_unrotated + rotated))
