"""Plans the catch-up step: the positions of its rows, and the live row of each request.

The live row is that of the last emitted token. Its output gives draft 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import PromptPack
from spec_lab.core.types import AttentionMetadata, Request, VerifiedRound
from spec_lab.drafters.picking import DraftedRows

State = TypeVar("State")


@dataclass(slots=True)
class Catchup:
    """The plan of a catch-up step over [batch * N] rows.

    Attributes:
        attention: metadata of all rows.
        live_attention: metadata of the live row alone, whose keys end at the row.
        live_rows: [batch] flat index of each request's live row.
        live_lens: [batch] L + n, the committed length after this round, at least 1.
    """

    attention: AttentionMetadata
    live_attention: AttentionMetadata
    live_rows: torch.Tensor
    live_lens: torch.Tensor


@dataclass(slots=True)
class CaughtUp:
    """The outcome of a catch-up step or a prompt pass, from which drafting continues.

    Attributes:
        hidden: [batch, hidden_size] the live rows' output.
        attention: one-row metadata of the live rows.
    """

    hidden: torch.Tensor
    attention: AttentionMetadata
    rows: DraftedRows


class CaughtUpDrafter(ABC, Generic[State]):
    """Drafts from the outcome of a first step. Another class takes that step, or a subclass does."""

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: rows past a slot's length are never read."""

    @abstractmethod
    def take_prompts(self, pack: PromptPack) -> CaughtUp | None:
        """Run chunks of prompts; None if no prompt ends."""

    @abstractmethod
    def take_round(self, verified: VerifiedRound) -> CaughtUp:
        """Run the catch-up step."""

    @abstractmethod
    def begin(self, live: CaughtUp) -> State:
        """Pick draft 1, or the drafts of level 1."""

    def ingest(self, pack: PromptPack) -> State | None:
        live = self.take_prompts(pack)
        return None if live is None else self.begin(live)

    def catch_up(self, verified: VerifiedRound) -> State:
        return self.begin(self.take_round(verified))


def plan_catchup(
    verified: VerifiedRound,
    backend: AttentionBackend,
    num_draft_tokens: int,
    kernels: KernelSet = TORCH_FORMS,
    first_position: int = 0,
) -> Catchup:
    """Plan rows j = 0..K at positions L + first_position + j; row n - 1 is live.

    The live row sees the keys up to its own. With the sequence length of all rows it would also see rejected rows
    (tokenspeed #217). An inactive request is treated as if n were 1 (`Verification.num_live`).
    """
    places: Callable[..., tuple[torch.Tensor, ...]] | None = kernels.get(Op.CATCHUP_PLACES, None)
    if places is not None:
        return _plan_at_once(places, verified, backend, num_draft_tokens, first_position)
    batch, emitted = verified.batch, verified.verification
    num_rows = emitted.tokens.shape[1]
    offsets = torch.arange(num_rows, device=batch.kv_lens.device)
    start = batch.kv_lens + first_position
    max_start = batch.max_kv_len + first_position
    attention = backend.build(
        positions=start.unsqueeze(1) + offsets,
        seq_lens=start + num_rows,
        page_table=batch.page_table,
        max_seq_len=max_start + num_rows,
    )
    num_live = emitted.num_live
    live_attention = backend.build(
        positions=(start + num_live - 1).unsqueeze(1),
        seq_lens=start + num_live,
        page_table=batch.page_table,
        max_seq_len=max_start + num_rows + num_draft_tokens - 1,
    )
    first_rows = torch.arange(batch.num_rows, device=batch.kv_lens.device) * num_rows
    return Catchup(attention, live_attention, first_rows + num_live - 1, batch.kv_lens + num_live)


def _plan_at_once(
    places: Callable[..., tuple[torch.Tensor, ...]],
    verified: VerifiedRound,
    backend: AttentionBackend,
    num_draft_tokens: int,
    first_position: int,
) -> Catchup:
    """Do the same as `plan_catchup`, with a kernel `places` that computes all positions in one call."""
    batch, emitted = verified.batch, verified.verification
    num_rows = emitted.tokens.shape[1]
    sizes: Any = backend  # kernels=native also chose the backend, which has a page size
    positions, slots, lengths, live_positions, live_slots, live_lengths, live_rows, live_lens = places(
        batch.kv_lens,
        emitted.num_emitted,
        batch.page_table,
        first_position,
        num_rows,
        sizes.page_size,
        sizes.max_positions,
    )
    max_len = batch.max_kv_len + first_position + num_rows
    live_max_len = max_len + num_draft_tokens - 1
    return Catchup(
        AttentionMetadata(positions, slots, lengths, batch.page_table, num_queries=num_rows, max_seq_len=max_len),
        AttentionMetadata(
            live_positions, live_slots, live_lengths, batch.page_table, num_queries=1, max_seq_len=live_max_len
        ),
        live_rows,
        live_lens,
    )
