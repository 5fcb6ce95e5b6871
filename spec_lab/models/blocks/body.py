"""The body of a block drafter (DFlash, arXiv 2602.06036): decoder layers that attend to the target's hidden
states.

The context of a request is its committed rows. For these a layer computes keys and values only, from the target's
tapped hidden states. A block is the pending token (the newest one, which has no context row yet) followed by mask
tokens. Its rows see the whole context and the whole block, unless a layer has a window or is causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from spec_lab.checkpoints.block_config import BlockConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kept import ALL_ROWS
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.blocks.conv import with_convolutions
from spec_lab.models.blocks.heads import scaled
from spec_lab.models.blocks.rows import MovingWindow, WholeBlock
from spec_lab.models.layer_builder import build_layer
from spec_lab.models.layers import Attention, DecoderLayer
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import RMSNorm, RowsPart, per_head_norm
from spec_lab.models.rope import RotaryTable, rotary_table


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place where each request's block begins: after its L' context rows. The pending token is at position L'.

    Attributes:
        lengths: [batch] L', the number of context rows of each request.
        page_table: [batch, num_pages + 1].
        max_length: upper bound of `lengths` known to the host.
    """

    lengths: torch.Tensor
    page_table: torch.Tensor
    max_length: int


class BlockBody:
    """Weights and forwards of a body; no state between calls."""

    def __init__(
        self,
        config: BlockConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        backend: AttentionBackend,
        max_positions: int,
        kernels: KernelSet = TORCH_FORMS,
        rotary: RotaryTable | None = None,
    ) -> None:
        """`embedding` [vocab, hidden_size] is the target's, used if the checkpoint has none. If `rotary` is None, the
        body makes its own table."""
        body = config.body
        plans, eps = body.layers, body.rms_norm_eps
        self.block_size = config.block_size
        self._backend = backend
        self._embedding = tensors.get("embed_tokens.weight", embedding)
        self._scale = config.embedding_scale
        self._masks = scaled(self._embedding[config.mask_token_id], self._scale).expand(config.block_size - 1, -1)
        self._fc = kernels.get(Op.LINEAR, make_linear(tensors["fc.weight"]))
        self._context_norm = kernels.get(Op.NORM, RMSNorm(tensors["hidden_norm.weight"], eps))
        self._norm = kernels.get(Op.NORM, RMSNorm(tensors["norm.weight"], eps))
        self._context = ContextHeads(plans, eps, tensors, kernels)
        self._num_kv_heads = plans[0].num_kv_heads
        self._is_causal = [config.is_causal(plan) for plan in plans]
        self._layers = [
            with_convolutions(
                _layer(plan, config, tensors, f"layers.{index}.", backend),
                config.conv,
                config.block_size,
                tensors,
                f"layers.{index}.",
            )
            for index, plan in enumerate(plans)
        ]
        like, plan = self._embedding, plans[0]
        self._rotary = rotary or rotary_table(plan.rope, plan.head_dim, max_positions, like.dtype, like.device)

    def write(self, features: torch.Tensor, cache: PagedKVCache, attention: AttentionMetadata) -> torch.Tensor:
        """Compute context rows [rows, hidden_size], write their keys and values for all layers, and return the rows.

        They are `features` [rows, taps * target_hidden_size], the target's tapped hidden states, after `fc` and a norm.
        """
        context = self._context_norm(self._fc(features))
        heads, values = self._context(context)
        keys = self._rotary.rows(attention.positions)(heads).unflatten(1, (len(self._layers), -1))
        for index, layer_cache in enumerate(cache.layers):
            self._backend.write(layer_cache, attention, keys[:, index], values[:, index])
        return context

    def slots(
        self, pending: torch.Tensor, place: BlockPlace, cache: PagedKVCache, first_row: int, num_slots: int
    ) -> torch.Tensor:
        """Run the blocks that begin with `pending` [batch], and return `num_slots` rows of each, from `first_row` on.

        Returns:
            [batch, num_slots, hidden_size], after the final norm.
        """
        rows = self._forward(pending, place, cache)[:, first_row : first_row + num_slots]
        # With one slot a request, flatten() returns a view whose rows are a block apart; contiguous() copies it.
        return self._norm(rows.flatten(0, 1).contiguous()).view(*rows.shape[:2], -1)

    def _forward(self, pending: torch.Tensor, place: BlockPlace, cache: PagedKVCache) -> torch.Tensor:
        """Run whole blocks, and return their rows [batch, block_size, hidden_size] before the final norm.

        A block's keys and values take the cache positions after the context. They overwrite what earlier rounds left
        there, and later context overwrites them.
        """
        num_requests, size = pending.shape[0], self.block_size
        ends, max_length = place.lengths + size, place.max_length + size
        positions = place.lengths.unsqueeze(1) + torch.arange(size, device=pending.device)
        rows = self._backend.build(positions, ends, place.page_table, max_length)
        as_one = self._backend.build(positions[:, -1:], ends, place.page_table, max_length)
        whole = WholeBlock(as_one=as_one, block_size=size, num_kv_heads=self._num_kv_heads)
        masks = self._masks.expand(num_requests, -1, -1)
        first = scaled(rows_at(self._embedding, pending), self._scale).unsqueeze(1)
        stream = torch.cat((first, masks), dim=1).flatten(0, 1)
        rotary = self._rotary.rows(rows.positions)
        for layer, layer_cache, is_causal in zip(self._layers, cache.layers, self._is_causal, strict=True):
            stream = layer(stream, Pass(layer_cache, rows, ALL_ROWS if is_causal else whole, rotary))
        return stream.view(num_requests, size, -1)


class ContextHeads:
    """Makes the keys and values of context rows for all layers in one product."""

    def __init__(
        self, plans: tuple[LayerPlan, ...], eps: float, tensors: Mapping[str, torch.Tensor], kernels: KernelSet
    ) -> None:
        plan = plans[0]
        prefixes = [f"layers.{index}.self_attn." for index in range(len(plans))]

        def stacked(kind: str) -> torch.Tensor:
            names = [f"{prefix}{name}.{kind}" for name in ("k_proj", "v_proj") for prefix in prefixes]
            return torch.cat([tensors[name] for name in names])

        bias = stacked("bias") if plan.qkv_bias else None
        self._product = kernels.get(Op.LINEAR, make_linear(stacked("weight"), bias))
        self._shape = 2, len(plans) * plan.num_kv_heads, plan.head_dim
        self._num_kv_heads = plan.num_kv_heads
        self._key_norm: RowsPart | None = None
        if plan.qk_norm:
            weights = [tensors[f"{prefix}k_norm.weight"].expand(plan.num_kv_heads, -1) for prefix in prefixes]
            self._key_norm = per_head_norm(torch.cat(weights), eps, plan.float32_norms)

    def __call__(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn context [rows, hidden_size] into keys and values of all layers.

        Returns:
            Keys [rows, layers * kv heads, head_dim] before their rotation, and values [rows, layers, kv heads,
            head_dim].
        """
        keys, values = self._product(context).unflatten(1, self._shape).unbind(1)
        if self._key_norm is not None:
            keys = self._key_norm(keys)
        return keys, values.unflatten(1, (-1, self._num_kv_heads))


def _layer(
    plan: LayerPlan, config: BlockConfig, tensors: Mapping[str, torch.Tensor], prefix: str, backend: AttentionBackend
) -> DecoderLayer:
    """Make a layer; each row of a block has a window of its own if the layer has a window that moves.

    With a window of W, a block sees W rows of context. All rows of a block attend from the position of its last row, so
    the backend's window is W + block_size. A causal layer is an ordinary one: each row sees W rows, itself among them.
    """
    window = config.window_of(plan)
    if window is not None and not config.is_causal(plan):
        window += config.block_size
    layer = build_layer(replace(plan, window=window), config.body.rms_norm_eps, tensors, prefix, backend)
    if not config.window_moves or plan.window is None:
        return layer
    assert isinstance(layer.mixer, Attention)
    last = config.block_size - 1
    limit = plan.window if config.most_context is None else config.most_context
    windows = tuple(min(plan.window + last - row, limit + last + 1) for row in range(last + 1))
    parts = {each.name: getattr(layer.mixer, each.name) for each in fields(Attention)}
    return replace(layer, mixer=MovingWindow(**parts | {"window": None}, windows=windows))
