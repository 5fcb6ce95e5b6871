"""Captures the pass of one short prompt: target, first token, the drafter's ingest and first drafts in one graph.

The graph has a fixed number of rows, and the prompt is at their beginning, as in other passes, so that attention adds
in the same order. The padding rows behind it have negative positions, so they write to scratch, and their output is not
read. With the graph, a pass takes the time of its products and memory reads instead of that of its launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from spec_lab.core.prompts import NOT_SAMPLED, LiveRows, PromptEnds, PromptPack, PromptSpan
from spec_lab.core.results import RowCounts
from spec_lab.core.types import Sequence
from spec_lab.engine.capture import CapturedGraph, GraphRecorder
from spec_lab.engine.prefill import PromptPass, RowsComputed

SIZES = (16, 32, 64, *range(128, 513, 64))
"""The numbers of rows that can be captured. A pass of more rows takes longer than its launches."""


@dataclass(eq=False)
class CapturedPromptPass(PromptPass):
    """Replays the pass of a single prompt that is not split, padded to the next captured size; others are not captured.

    Attributes:
        sizes: the numbers of rows that are captured, ascending; none below that from which a prompt's bits are its own.
    """

    recorder: GraphRecorder

    def __post_init__(self) -> None:
        sizes = {min(size, self.chunk_size) for size in SIZES}
        self.sizes = sorted(size for size in sizes if size >= self.rounding.least_rows)
        self._graphs: dict[int, PromptGraph] = {}

    def prepare(self) -> None:
        """Capture the pass of every size, on the scratch slot."""
        for size in self.sizes:
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    def run(self, sequences: Iterable[Sequence]) -> dict[int, RowCounts]:
        pack = list(sequences)
        span = self._next_chunk(pack[0])
        # A prompt of several chunks ends past all sizes.
        size = next((size for size in self.sizes if size >= span.end), None)
        if len(pack) > 1 or not span.is_last or size is None or span.end < self.rounding.least_captured:
            return super().run(pack)
        graph = self._graphs.get(size) or self._graphs.setdefault(size, self._capture(size))
        sequence = pack[0]
        token = graph.replay(span, sequence.request.prompt_ids)
        sequence.num_prefilled = sequence.kv_len = span.end
        sequence.tokens.append(token)
        return {span.slot: graph.computed.of(span)}

    def _capture(self, size: int) -> PromptGraph:
        """Capture a pass of `size` rows, and clear the scratch slot afterwards."""
        slots = self.round.parts.slots
        scratch = slots.table.scratch_slot
        inputs = torch.zeros(2 * size + 2, dtype=torch.int64, device=slots.kv_lens.device)
        inputs[-2:] = torch.tensor([scratch, 1])
        computed: list[RowsComputed] = []

        def run() -> torch.Tensor:
            pack = self._fixed_rows(inputs, size)
            computed[:] = [self.forward(pack)]
            assert pack.ends is not None
            return pack.ends.tokens

        graph = PromptGraph(self.recorder.capture(run), inputs, computed[0])
        slots.kv_lens[scratch] = 0
        slots.input_ids[scratch].zero_()
        return graph

    def _fixed_rows(self, inputs: torch.Tensor, size: int) -> PromptPack:
        """Make the rows of one prompt whose length only the device knows."""
        parts = self.round.parts
        token_ids, next_token_ids, slot_ids, lengths = inputs.split((size, size, 1, 1))
        pages = parts.slots.table.pages.index_select(0, slot_ids)
        rows = torch.arange(size, device=inputs.device)
        positions = torch.where(rows < lengths, rows, rows - size).unsqueeze(0)
        # Rows attend as those of a prompt of `size` tokens. The prompt's own rows see none behind them.
        attention = parts.backend.build(positions, torch.full_like(lengths, size), pages, size)
        attention.known_len = size
        last = parts.backend.build(
            (lengths - 1).unsqueeze(1), lengths.clone(), pages, size + parts.drafter.num_draft_tokens
        )
        live = LiveRows(lengths - 1, last, self.rounding.is_promised)
        ends = PromptEnds(slot_ids, lengths.clone(), NOT_SAMPLED, live, max_kv_len=size)
        return PromptPack((), slot_ids, token_ids, next_token_ids, features=None, attention=attention, ends=ends)


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """The captured pass of one prompt in a fixed number of rows.

    Attributes:
        inputs: [2 * rows + 2] the tokens, the token after each, the slot and the length.
        computed: for which rows features and logits were computed.
    """

    graph: CapturedGraph[torch.Tensor]
    inputs: torch.Tensor
    computed: RowsComputed

    def replay(self, span: PromptSpan, prompt_ids: tuple[int, ...]) -> int:
        """Run the prompt in its slot, and return the token sampled after it."""
        size = (len(self.inputs) - 2) // 2
        unread = [0] * (size - span.end)
        # The row behind the prompt's last is a placeholder, until the sampled token replaces it.
        values = [*prompt_ids, *unread, *prompt_ids[1:], 0, *unread, span.slot, span.end]
        self.inputs.copy_(torch.tensor(values, pin_memory=self.inputs.is_cuda), non_blocking=True)
        self.graph.replay()
        return int(self.graph.outputs)
