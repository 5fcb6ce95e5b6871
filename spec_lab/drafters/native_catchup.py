"""kernels=native plans a catch-up step in one call."""

from __future__ import annotations

from typing import cast

from spec_kernels.native.rounds import catchup_places
from spec_lab.attention.native_backend import NativeAttention
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata, VerifiedRound
from spec_lab.drafters.catchup import Catchup


def plan_native_catchup(
    verified: VerifiedRound, backend: AttentionBackend, num_draft_tokens: int, first_position: int = 0
) -> Catchup:
    """Plan what `plan_catchup` does."""
    sizes = cast(NativeAttention, backend)
    batch, emitted = verified.batch, verified.verification
    num_requests, num_rows = emitted.tokens.shape
    parts = [num_requests * num_rows] * 2 + [num_requests] * 6
    places = batch.kv_lens.new_empty(sum(parts))
    rows = batch.page_table, first_position, num_rows, sizes.page_size, sizes.max_positions
    catchup_places(places, batch.kv_lens, emitted.num_emitted, *rows)
    positions, slots, lengths, live_positions, live_slots, live_lengths, live_rows, live_lens = places.split(parts)
    max_len = batch.max_kv_len + first_position + num_rows
    live_max_len = max_len + num_draft_tokens - 1
    return Catchup(
        AttentionMetadata(positions, slots, lengths, batch.page_table, num_rows, max_len),
        AttentionMetadata(live_positions, live_slots, live_lengths, batch.page_table, 1, live_max_len),
        live_rows,
        live_lens,
    )
