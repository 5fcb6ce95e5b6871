"""The rows of a prompt pass: one forward holds the rows of chunks of several prompts, in succession.

vLLM and SGLang fill a step up to a token budget in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from spec_lab.core.types import AttentionMetadata


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A chunk of one prompt: the rows at positions start..end - 1.

    Attributes:
        is_last: the prompt ends with this chunk.
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
    """The means by which a prompt's rows get the same bits, whatever rows share their forward. The defaults do not
    promise that.

    Attributes:
        least_rows: the smallest number of rows of a forward; padding rows fill up a smaller one.
        products: makes a context manager around a forward. Inside, the library's matrix products of at least
            `least_rows` rows round every row alike.
        least_captured: the fewest tokens of a prompt whose rows attend alike if padding rows follow them.
    """

    least_rows: int = 0
    products: Callable[[], AbstractContextManager[None]] = nullcontext
    least_captured: int = 0

    @property
    def is_promised(self) -> bool:
        return self.least_rows > 0

    def filling(self, spans: Sequence[PromptSpan], slot: int) -> tuple[PromptSpan, ...]:
        """Return the padding span that follows `spans` if they have fewer than `least_rows` rows.

        Its positions are negative, so it writes to the scratch page, whatever `slot` it is given.
        """
        num_missing = self.least_rows - sum(span.num_rows for span in spans)
        return (PromptSpan(slot, -num_missing, 0, is_last=False),) if num_missing > 0 else ()


NO_ROUNDING = PromptRounding()


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a forward whose output is read: the last row of each prompt that ends in it.

    Attributes:
        rows: [ended] flat indices into the rows of the forward.
        attention: metadata of these rows alone, one query each, with room for the draft steps.
        attend_with_others: in the target, these rows attend together with all other rows of their chunk. A single query
            would round differently.
    """

    rows: torch.Tensor
    attention: AttentionMetadata
    attend_with_others: bool = False

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the live rows from `rows` of the forward. If `rows` holds only live rows already, return it
        unchanged."""
        return rows if rows.shape[0] == self.rows.shape[0] else rows.index_select(0, self.rows)


NOT_SAMPLED = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class PromptEnds:
    """The prompts that end in a forward, for which drafting begins.

    Attributes:
        slot_ids: [ended].
        kv_lens: [ended] tokens of each prompt, L of its first round. This is a copy, which draft steps do not change.
        tokens: [ended] the first token that the target sampled for each prompt; `NOT_SAMPLED` before.
        live: the last row of each prompt.
        max_kv_len: upper bound of `kv_lens` known to the host.
    """

    slot_ids: torch.Tensor
    kv_lens: torch.Tensor
    tokens: torch.Tensor
    live: LiveRows
    max_kv_len: int


@dataclass(slots=True)
class PromptPack:
    """Prompt chunks for the target to run, and then for the drafter to ingest.

    Attributes:
        spans: the chunk of each request, in the order of the rows; a padding span is last. Empty in a captured pass.
        slot_ids: [requests] their slots.
        token_ids: [rows] the tokens of the chunks.
        next_token_ids: [rows] the token at position p + 1 for the row at position p; the sampled token for the last
            position of a prompt.
        features: [rows, feature_size] hidden states of the target; [ended, feature_size] if the drafter reads only the
            last row of prompts, and the target dropped the others. None if the drafter reads none, and before.
        attention: the target's metadata of these rows (same positions and slots).
        ends: the prompts that end here; None if there are none, and then nothing is drafted.
    """

    spans: tuple[PromptSpan, ...]
    slot_ids: torch.Tensor
    token_ids: torch.Tensor
    next_token_ids: torch.Tensor
    features: torch.Tensor | None
    attention: AttentionMetadata
    ends: PromptEnds | None
