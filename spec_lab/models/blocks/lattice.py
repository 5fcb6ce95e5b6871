"""drafter.head=lattice: a transformer over the candidates of all slots scores each pair in adjacent slots.

This is LiLiCorr (NVIDIA, arXiv 2608.20530), as in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.block_config import LatticeSizes
from spec_lab.models.blocks.heads import BlockRows, HeadParts, JoinedSlots, SlotWalk, behind, nothing_carried
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.norms import RMSNorm, RowsPart


@dataclass(frozen=True, slots=True)
class SiluMLP:
    """Computes down(silu(up(x)))."""

    up: Linear
    down: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(rows)))


@dataclass(frozen=True, slots=True)
class LatticeLayer:
    """A pre-norm transformer layer without a mask."""

    norm: RowsPart
    heads: Linear
    out: Linear
    mlp_norm: RowsPart
    mlp: RowsPart
    num_heads: int

    def __call__(self, stream: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Run the layer on [batch, rows, size]; `bias` [heads, rows, rows] is added to the attention scores."""
        shape = stream.shape
        heads = self.heads(self.norm(stream).flatten(0, 1)).view(*shape[:2], 3, self.num_heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias.unsqueeze(0))
        rows = stream.flatten(0, 1) + self.out(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
        return (rows + self.mlp(self.mlp_norm(rows))).view(shape)


class LatticeHead(JoinedSlots):
    """Scores the candidates of a slot given the token before it."""

    reads_all_slots = True

    def __init__(self, sizes: LatticeSizes, parts: HeadParts) -> None:
        self._parts, self._sizes = parts, sizes
        eps = parts.config.body.rms_norm_eps
        self._tensors: Mapping[str, torch.Tensor] = {
            name.removeprefix("lilicorr."): tensor
            for name, tensor in parts.tensors.items()
            if name.startswith("lilicorr.")
        }
        self._token = parts.linear("lilicorr.token_proj") if "token_proj.weight" in self._tensors else None
        self._hidden, self._context = parts.linear("lilicorr.pass_hidden_proj"), parts.linear("lilicorr.context_proj")
        self._features = self._mlp("feature_mlp")
        self._layers = [self._layer(f"layers.{index}", eps) for index in range(sizes.num_layers)]
        self._out_norm = RMSNorm(self._tensors["output_norm.weight"], eps)
        self._anchor_norm = RMSNorm(self._tensors["anchor_norm.weight"], eps)
        self._factors = parts.linear("lilicorr.factor_input_proj")
        self._leaving, self._entering = parts.linear("lilicorr.out_head"), parts.linear("lilicorr.in_head")
        self._anchor_leaving = parts.linear("lilicorr.anchor_out_head")
        self._bias = self._pair_bias(parts.config.slots.most_drafts)
        ranks = torch.arange(sizes.topk, device=self._bias.device)
        self._rank_features = torch.stack((ranks / max(sizes.topk - 1, 1), (ranks == 0).float()), dim=-1)

    def begin(self, rows: BlockRows) -> SlotWalk:
        log_probs, ids = self._parts.candidates(torch.log_softmax(rows.logits.float(), dim=-1), self._sizes.topk)
        return SlotWalk(
            rows.hidden, log_probs, nothing_carried(rows.hidden), ids, edges=self._edges(rows, log_probs, ids)
        )

    def scores(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> SlotScores:
        assert walk.ids is not None and walk.edges is not None
        # The pending token is not a candidate of a slot, so the first slot's edges are the same for every predecessor.
        taken = behind(previous, walk.ids, (column - 1).clamp(min=0)) == previous.unsqueeze(1)
        edges = behind(previous, walk.edges, column)
        place = taken.int().argmax(dim=1).view(-1, 1, 1).expand(-1, 1, edges.shape[2])
        return SlotScores(edges.gather(1, place).squeeze(1), behind(previous, walk.ids, column), self._parts.vocab_size)

    def _edges(self, rows: BlockRows, log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Score each candidate after each candidate of the slot before: [batch, slots, topk before, topk]."""
        lattice = self._lattice(rows.hidden, log_probs, ids)
        anchor = self._anchor_norm(self._context(rows.context))
        beside = anchor.view(-1, 1, 1, anchor.shape[1]).expand_as(lattice)
        read = torch.cat((lattice, beside, lattice * beside), dim=-1)
        factors = F.silu(self._of_rows(self._factors, read))
        leaving, entering = (self._unit(self._of_rows(head, factors)) for head in (self._leaving, self._entering))
        start = self._unit(self._anchor_leaving(anchor)).view(-1, 1, 1, leaving.shape[-1])
        before = torch.cat((start.expand(-1, -1, *leaving.shape[2:]), leaving[:, :-1]), dim=1)
        return self._sizes.logit_scale * torch.matmul(before, entering.transpose(-1, -2)).float()

    def _lattice(self, hidden: torch.Tensor, log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Run the transformer, and return its output [batch, slots, topk, size]."""
        tensors, shape = self._tensors, ids.shape
        tokens = self._parts.embedded(ids.flatten())
        stream = (tokens if self._token is None else self._token(tokens)).view(*shape, -1)
        stream = stream + self._of_rows(self._hidden, hidden).unsqueeze(2)
        ranks = self._rank_features.expand(*shape, -1)
        likely = torch.stack((log_probs, log_probs.exp(), log_probs - log_probs.amax(-1, keepdim=True)), dim=-1)
        features = torch.cat((likely, ranks), dim=-1).to(stream.dtype)
        stream = stream + self._of_rows(
            self._features,
            F.layer_norm(features, (features.shape[-1],), tensors["feature_norm.weight"], tensors["feature_norm.bias"]),
        )
        stream = stream + tensors["slot_embedding"][:, 0] + tensors["rank_embedding"][:, 0]
        stream = stream.flatten(1, 2)
        for layer in self._layers:
            stream = layer(stream, self._bias)
        return self._out_norm(stream).view(*shape, -1)

    def _pair_bias(self, num_slots: int) -> torch.Tensor:
        """Make the attention bias [heads, rows, rows] of candidates, which depends on the distance of their slots."""
        by_distance = self._tensors["relative_slot_bias"]
        slots = torch.arange(num_slots, device=by_distance.device).repeat_interleave(self._sizes.topk)
        distance = slots.unsqueeze(1) - slots
        same = (distance == 0) * self._tensors["same_slot_bias"].view(-1, 1, 1)
        return by_distance[:, distance + self._parts.config.block_size - 1] + same

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(vectors, dim=-1, eps=self._sizes.vector_eps)

    def _of_rows(self, part: RowsPart | Linear, values: torch.Tensor) -> torch.Tensor:
        """Apply `part`, which takes a matrix of rows, to the last dimension of `values`."""
        return part(values.reshape(-1, values.shape[-1])).unflatten(0, values.shape[:-1])

    def _mlp(self, name: str) -> SiluMLP:
        up, down = (self._parts.linear(f"lilicorr.{name}.{side}") for side in ("up_proj", "down_proj"))
        return SiluMLP(up, down)

    def _layer(self, name: str, eps: float) -> LatticeLayer:
        tensors = self._tensors
        return LatticeLayer(
            norm=RMSNorm(tensors[f"{name}.attn_norm.weight"], eps),
            heads=make_linear(tensors[f"{name}.attn.in_proj_weight"], tensors[f"{name}.attn.in_proj_bias"]),
            out=self._parts.linear(f"lilicorr.{name}.attn.out_proj"),
            mlp_norm=RMSNorm(tensors[f"{name}.mlp_norm.weight"], eps),
            mlp=self._mlp(f"{name}.mlp"),
            num_heads=self._sizes.num_heads,
        )
