"""Teacher forcing: the target's greedy choice at every position of a given text, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.protocols import AttentionBackend, Target
from spec_lab.core.types import FeatureSpec
from spec_lab.engine.kv_cache import NUM_RESERVED_PAGES, PagedKVCache, PageTable
from spec_lab.pruning.selection import AllRows


@dataclass(frozen=True, slots=True)
class GreedyChoice:
    """What plain greedy decoding would emit at each output position, given the text before it.

    Attributes:
        token_ids: the argmax at each position.
        margins: difference of the two largest logits there, in float32.
        top_logits: the largest logit there.
    """

    token_ids: list[int]
    margins: list[float]
    top_logits: list[float]


class TeacherForcing:
    """Runs whole texts through a target, chunk by chunk, over a small cache of its own."""

    def __init__(
        self, target: Target, backend: AttentionBackend, cache: PagedKVCache, page_size: int, chunk_size: int
    ) -> None:
        """`cache` holds one sequence of the longest text."""
        num_pages = cache.kv.shape[1] // page_size - NUM_RESERVED_PAGES
        table = PageTable(1, num_pages * page_size, page_size, cache.kv.device)
        table.assign(0, list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + num_pages)))
        self._page_table = table.pages[:1]
        self._target = target
        self._backend = backend
        self._cache = cache
        self._chunk_size = chunk_size

    @torch.inference_mode()
    def greedy_choices(self, prompt_ids: list[int], output_ids: list[int]) -> GreedyChoice:
        """The target's choice for each of `output_ids`, fed the ones before it."""
        text = [*prompt_ids, *output_ids[:-1]]
        tops = [self._top_two(text, start) for start in range(0, len(text), self._chunk_size)]
        first = len(prompt_ids) - 1
        values = torch.cat([top.values for top in tops])[first:]
        return GreedyChoice(
            token_ids=torch.cat([top.indices for top in tops])[first:, 0].tolist(),
            margins=(values[:, 0] - values[:, 1]).tolist(),
            top_logits=values[:, 0].tolist(),
        )

    def _top_two(self, text: list[int], start: int) -> torch.return_types.topk:
        """The two largest logits of each row of the chunk that begins at `start`."""
        device = self._page_table.device
        end = min(start + self._chunk_size, len(text))
        positions = torch.arange(start, end, device=device).unsqueeze(0)
        attention = self._backend.build(positions, torch.tensor([end], device=device), self._page_table, end)
        ids = torch.tensor(text[start:end], device=device)
        output = self._target.forward(ids, self._cache, attention, AllRows(), FeatureSpec())
        return self._target.logits(output.hidden).float().topk(2, dim=-1)
