"""Teacher forcing finds the target's greedy choice at every position of a given text, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, PagedKVCache
from spec_lab.core.protocols import AttentionBackend, Target
from spec_lab.core.types import FeatureSpec
from spec_lab.engine.pages import PageTable
from spec_lab.engine.states import slot_states
from spec_lab.errors import UserError
from spec_lab.pruning.selection import AllRows

MOST_LOGIT_ROWS = 512
"""Logits of a large vocabulary take gigabytes in float32, if they are those of 8192 rows."""


@dataclass(frozen=True, slots=True)
class GreedyChoice:
    """Holds the tokens that plain greedy decoding would emit at each output position, given the text before it.

    Attributes:
        token_ids: the argmax at each position, lowest id first.
        top_logits: its logit, in float32.
        margins: how far the second largest logit lies under it.
        gaps: how far the logit of the text's own token lies under it.
    """

    token_ids: list[int]
    top_logits: list[float]
    margins: list[float]
    gaps: list[float]


class TeacherForcing:
    """Runs whole texts through a target, chunk by chunk, over a small cache of its own."""

    def __init__(
        self, target: Target, backend: AttentionBackend, cache: PagedKVCache, page_size: int, chunk_size: int
    ) -> None:
        """`cache` holds one sequence of the longest text."""
        num_pages = cache.num_pages - NUM_RESERVED_PAGES
        table = PageTable(1, num_pages * page_size, page_size, cache.device)
        table.assign(0, list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + num_pages)))
        self._page_table = table.pages[:1]
        self.eos_token_ids = target.eos_token_ids
        self._target = target
        self._backend = backend
        self._cache = cache
        self._states = slot_states(cache)
        self._chunk_size = chunk_size

    @torch.inference_mode()
    def greedy_choices(self, prompt_ids: list[int], output_ids: list[int]) -> GreedyChoice:
        """Return the target's choice for each of `output_ids`, fed the ones before it."""
        text = [*prompt_ids, *output_ids]
        choices = GreedyChoice([], [], [], [])
        for start, logits in self._logits(text[:-1]):
            end = start + logits.shape[0]
            following = torch.tensor(text[start + 1 : end + 1], device=logits.device).unsqueeze(1)
            choices.token_ids.extend(logits.argmax(dim=-1).tolist())
            top, second = logits.topk(2, dim=-1).values.unbind(1)
            choices.top_logits.extend(top.tolist())
            choices.margins.extend((top - second).tolist())
            choices.gaps.extend((top - logits.gather(1, following).squeeze(1)).tolist())
        first = len(prompt_ids) - 1
        return GreedyChoice(
            choices.token_ids[first:], choices.top_logits[first:], choices.margins[first:], choices.gaps[first:]
        )

    @torch.inference_mode()
    def require_finite(self, token_ids: Sequence[int]) -> None:
        """Raise UserError where the target's logits at some position of a text are NaN or infinite.

        Any token is then as good as any other, and plain decoding emits the very tokens of a run that means nothing.
        """
        for start, logits in self._logits(token_ids):
            broken = ~logits.isfinite().all(dim=-1)
            if bool(broken.any()):
                position = start + int(broken.nonzero()[0])
                dtype = str(self._cache.dtype).removeprefix("torch.")
                raise UserError(
                    f"target: its logits become NaN or infinite in dtype={dtype} (at position {position} of a text); "
                    f"{'use dtype=bfloat16 or float32' if dtype == 'float16' else 'use another checkpoint'}"
                )

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the [positions, vocab] float32 logits behind each token of a text."""
        return torch.cat([logits for _, logits in self._logits(token_ids)])

    def _logits(self, token_ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the [rows, vocab] float32 logits behind stretches of a text, each with its first position."""
        for start in range(0, len(token_ids), self._chunk_size):
            hidden = self._hidden(list(token_ids[start : start + self._chunk_size]), start)
            for first, rows in enumerate(hidden.split(MOST_LOGIT_ROWS)):
                yield start + first * MOST_LOGIT_ROWS, self._target.logits(rows).float()

    def _hidden(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Return the [rows, hidden_size] hidden states of the chunk that begins at position `start`."""
        if start == 0:
            self._states.clear(0)
        device = self._page_table.device
        end = start + len(token_ids)
        positions = torch.arange(start, end, device=device).unsqueeze(0)
        attention = self._backend.build(positions, torch.tensor([end], device=device), self._page_table, end)
        attention.recurrent = self._states.of_prompts(torch.zeros(1, dtype=torch.int64, device=device))
        ids = torch.tensor(token_ids, device=device)
        return self._target.forward(ids, self._cache, attention, AllRows(), FeatureSpec()).hidden
