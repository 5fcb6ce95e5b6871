"""kernels=native can run all layers of a target in one C call, and a draft head's layer with its input in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_kernels.native import forwards as native
from spec_kernels.native.parts import NativeProduct
from spec_lab.core.kept import Drop
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata, StartedDraft, VerifiedRound
from spec_lab.models.draft_parts import DraftLayers
from spec_lab.models.layer_stack import LayerStack
from spec_lab.models.rope import RotaryTable

MAX_ROWS = 128
"""With more rows arithmetic is the bound, and the library is as fast: docs/log/cpu.md."""


def are_few(rows: torch.Tensor, metadata: AttentionMetadata) -> bool:
    """Return whether the kernels take these rows: few, equally many for each request, and with one length."""
    return 0 < rows.shape[0] <= MAX_ROWS and not metadata.batches and metadata.window_lens is None


class NativeStack:
    """All layers as one C call, if rows are few and none is dropped in the last layer; else layer by layer."""

    __slots__ = ("_layers", "_plain", "_table")

    def __init__(self, plain: LayerStack, layers: native.NativeLayers) -> None:
        """All `layers` rotate their heads with the one rotary table of `plain`."""
        (table,) = plain.rotary_tables
        self._table = table.rows_of_positions
        self._layers = layers
        self._plain = plain

    def __call__(
        self, stream: torch.Tensor, at: Pass, tapped: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        attention = at.metadata
        if at.kept.drop.is_inside or not are_few(stream, attention):
            return self._plain(stream, at, tapped)
        streams = stream.new_empty(len(self._layers), *stream.shape)
        native.decoder_layers(
            streams,
            at.cache.kv,
            stream,
            self._table,
            attention.positions,
            attention.slot_mapping,
            attention.page_table,
            attention.seq_lens,
            attention.num_queries,
            self._layers.address,
        )
        return streams[-1], [streams[index - 1] if index else stream for index in tapped]


class NativeHeadLayer:
    """A draft head's layer and its input as one C call, or part by part if rows are many.

    Attributes:
        layer: the layer as the kernels read it.
        table: the rotary table.
    """

    __slots__ = ("_parts", "layer", "table")

    def __init__(self, parts: DraftLayers, rotary: RotaryTable, layer: native.NativeDraftLayer) -> None:
        """`parts` handles rows that are not few (`are_few`)."""
        self.table = rotary.rows_of_positions
        self.layer = layer
        self._parts = parts

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        attention, kept = at.metadata, at.kept
        if not are_few(token_ids, attention):
            return self._parts(token_ids, hidden, at)
        attending = kept.behind(attention) if kept.drop is Drop.BEFORE_ATTENTION else attention
        live_rows = kept.rows if kept.drop.is_inside else None
        num_live = len(token_ids) if live_rows is None else len(live_rows)
        out = hidden.new_empty(0 if kept.is_empty else num_live, hidden.shape[1])
        native.draft_layer(
            out,
            at.cache.kv,
            token_ids,
            hidden.contiguous(),
            self.table,
            attention.positions,
            attention.slot_mapping,
            attending.page_table,
            attending.seq_lens,
            live_rows,
            attending.num_queries,
            attending is attention,
            self.layer.address,
        )
        return kept.live(out)


class NativeChain:
    """A head's catch-up with its first draft as one C call, and its further drafts as another."""

    __slots__ = ("_fuse", "_head", "_layer")

    def __init__(self, fuse: NativeProduct | None, layer: NativeHeadLayer, head: native.NativeHead) -> None:
        """`fuse` turns the target's features into the input of `layer`; None if a norm precedes that product, which the
        C code does not support. The output of `layer` is fed back."""
        self._fuse = fuse
        self._layer = layer
        self._head = head

    def start(
        self, verified: VerifiedRound, cache: LayerCache, drop: Drop, num_draft_tokens: int
    ) -> StartedDraft | None:
        """Run the catch-up step over the rows of `verified`, up to the first draft.

        If C has no call for this case, it does nothing and returns None, and the caller uses the head's parts.
        """
        if self._fuse is None:
            return None
        is_pruned = drop.is_inside
        batch, emitted, features = verified.batch, verified.verification, verified.features
        assert features is not None
        num_requests, num_rows = emitted.tokens.shape
        all_rows, table = num_requests * num_rows, self._layer.table
        if all_rows > MAX_ROWS:
            return None
        parts = [2 * all_rows + num_requests, *[num_requests] * 6]
        places = batch.kv_lens.new_empty(sum(parts))
        num_hiddens = num_requests + all_rows * (1 if is_pruned else 2)
        hiddens = features.new_empty(num_hiddens, self._fuse.num_outputs)
        native.draft_start(
            places,
            hiddens,
            cache.kv,
            features,
            emitted.tokens,
            batch.kv_lens,
            emitted.num_emitted,
            table,
            batch.page_table,
            is_pruned,
            drop is not Drop.BEFORE_ATTENTION,
            self._layer.layer.address,
            self._fuse.address,
            *self._head.arguments,
        )
        _, positions, slots, lengths, _, live_lens, tokens = places.split(parts)
        max_len = batch.max_kv_len + num_rows + num_draft_tokens - 1
        attention = AttentionMetadata(positions, slots, lengths, batch.page_table, num_queries=1, max_seq_len=max_len)
        return StartedDraft(tokens, hiddens[:num_requests], attention, live_lens)

    def steps(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        num_draft_tokens: int,
    ) -> torch.Tensor:
        """Return all drafts [batch, num_draft_tokens], given the first drafts `tokens` [batch].

        `hidden` [batch, hidden_size] are the outputs from which these were picked. The one-row metadata is advanced in
        place.
        """
        batch_size, hidden_size = hidden.shape
        drafts = tokens.new_empty(num_draft_tokens, batch_size)
        hiddens = hidden.new_empty(num_draft_tokens - 1, batch_size, hidden_size)
        native.draft_steps(
            drafts,
            hiddens,
            cache.kv,
            attention.positions,
            attention.slot_mapping,
            attention.seq_lens,
            tokens,
            hidden,
            self._layer.table,
            attention.page_table,
            self._layer.layer.address,
            *self._head.arguments,
        )
        return drafts.t()
