"""The rows of a prompt pass: chunks of several prompts, one behind the other in one forward (vLLM and SGLang pack a
step by a budget of tokens in the same way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from spec_lab.core.types import AttentionMetadata


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Names a stretch of one prompt: the rows of positions start..end - 1.

    Attributes:
        is_last: the prompt ends with it.
    """

    slot: int
    start: int
    end: int
    is_last: bool

    @property
    def num_rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PromptRounding:
    """Says how a prompt's rows come to the same bits whatever stands beside them; as it stands, they do not.

    Attributes:
        least_rows: of a forward; rows that nobody reads fill it up.
        products: the context of a forward, in which the library's products of so many rows round alike.
    """

    least_rows: int = 0
    products: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_promised(self) -> bool:
        return self.least_rows > 0

    def filling(self, spans: Sequence[PromptSpan], slot: int) -> tuple[PromptSpan, ...]:
        """Return the stretch, of no prompt, that stands behind `spans` where they have too few rows: it writes to
        scratch, whosever `slot` it is given."""
        num_missing = self.least_rows - sum(span.num_rows for span in spans)
        return (PromptSpan(slot, -num_missing, 0, is_last=False),) if num_missing > 0 else ()


NO_ROUNDING = PromptRounding()


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a forward whose output somebody reads: the last one of each prompt that ends in it.

    Attributes:
        rows: [ended] flat indices into the rows of the forward.
        attention: metadata of these rows alone, one query each, with room for the draft steps.
        attend_with_others: in the target a row attends as it would if all were read; a lone query rounds otherwise.
    """

    rows: torch.Tensor
    attention: AttentionMetadata
    attend_with_others: bool = False

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick them from the rows of the forward; where they alone were kept, those are all there are."""
        return rows if rows.shape[0] == self.rows.shape[0] else rows.index_select(0, self.rows)


@dataclass(slots=True)
class PromptEnds:
    """The prompts that end in a forward, for which drafting begins.

    Attributes:
        slot_ids: [ended].
        kv_lens: [ended] tokens of each prompt, L of its first round; no view of what draft steps move.
        tokens: [ended] what the target sampled behind each prompt.
        live: the last row of each.
        max_kv_len: the longest of these prompts, known to the host.
    """

    slot_ids: torch.Tensor
    kv_lens: torch.Tensor
    tokens: torch.Tensor
    live: LiveRows
    max_kv_len: int


@dataclass(slots=True)
class PromptPack:
    """Chunks of prompts just run through the target, for the drafter to ingest.

    Attributes:
        spans: the chunk of each request, in the order of the rows; what fills the forward up stands last.
        slot_ids: [requests] their slots.
        token_ids: [rows] the chunks' own tokens.
        next_token_ids: [rows] token at position p + 1 for the row at position p; behind a prompt's end the sampled one.
        features: [rows, feature_size] of the target, None when the drafter asked for none; [ended, feature_size] when
            it asked for the last row of prompts only.
        attention: the target's metadata of these rows (same positions and slots).
        ends: None where no prompt ends here, so that no draft is wanted.
    """

    spans: tuple[PromptSpan, ...]
    slot_ids: torch.Tensor
    token_ids: torch.Tensor
    next_token_ids: torch.Tensor
    features: torch.Tensor | None
    attention: AttentionMetadata
    ends: PromptEnds | None
