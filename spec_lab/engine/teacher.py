"""Teacher forcing runs a given text through the target, for instance to find its greedy choice at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.errors import UserError
from spec_lab.core.kept import ALL_ROWS, Drop, Kept, LastPromptRow
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import NO_ROUNDING, LiveRows, PromptRounding, PromptSpan
from spec_lab.core.protocols import Target
from spec_lab.core.ragged import build_metadata
from spec_lab.core.types import AttentionMetadata, FeatureSpec
from spec_lab.engine.pages import PageTable
from spec_lab.engine.states import SlotStates

MOST_LOGIT_ROWS = 512
"""The most rows of logits computed at once: with a large vocabulary, 8192 rows would take gigabytes in float32."""

NOISE_ROWS = 256
"""The most positions from which the rounding noise of a target is estimated."""


@dataclass(frozen=True, slots=True)
class GreedyChoice:
    """The tokens that plain greedy decoding would emit at each output position, given the text before it.

    Attributes:
        token_ids: the argmax at each position; of equals the lowest id.
        top_logits: its logit, in float32.
        margins: the top logit minus the second largest.
        gaps: the top logit minus the logit of the text's own token.
    """

    token_ids: list[int]
    top_logits: list[float]
    margins: list[float]
    gaps: list[float]


class TeacherForcing:
    """Runs whole texts through a target, chunk by chunk, over a small cache of its own.

    Some targets give each row of a small forward the bits that it would have alone. Then `greedy_choices` runs a text
    as plain decoding would, but with up to `invariant_rows` rows at once after the prompt. The choices are then exactly
    those of plain decoding, ties included. Otherwise a text is run in chunks, which may round differently.
    """

    def __init__(
        self,
        target: Target,
        backend: AttentionBackend,
        cache: PagedKVCache,
        page_size: int,
        chunk_size: int,
        invariant_rows: int = 1,
        rounding: PromptRounding = NO_ROUNDING,
    ) -> None:
        """Make a page table of one sequence over the whole cache.

        Args:
            cache: holds one sequence of the longest text.
            invariant_rows: in a forward of up to so many rows, a row's bits do not depend on the others; 1 if that is
                not promised.
            rounding: the rounding of the run's prompt passes.
        """
        num_pages = cache.num_pages - NUM_RESERVED_PAGES
        table = PageTable(1, num_pages * page_size, page_size, cache.device)
        table.assign(0, list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + num_pages)))
        self._page_table = table.pages[:1]
        self.eos_token_ids = target.eos_token_ids
        self._target = target
        self._backend = backend
        self._cache = cache
        self._states = SlotStates(cache.recurrent)
        self._chunk_size = chunk_size
        self._invariant_rows = invariant_rows
        self._rounding = rounding

    @property
    def rounds_to(self) -> torch.dtype:
        """Return the type whose rounding an audit must allow for.

        A key in e4m3 is rounded more coarsely than in bfloat16. Where attention rounds differently for one row and for
        several, a difference of 1e-6 moves some of its numbers by a step, and those move others in later layers.
        """
        return torch.bfloat16 if self._cache.is_narrow else self._cache.dtype

    @torch.inference_mode()
    def greedy_choices(self, prompt_ids: list[int], output_ids: list[int]) -> GreedyChoice:
        """Return the target's choice at the position of each of `output_ids`, given the tokens before it."""
        as_decoded = self._invariant_rows > 1
        blocks = (self._decoded if as_decoded else self._in_chunks)(prompt_ids, output_ids[:-1])
        choices = GreedyChoice([], [], [], [])
        for logits in blocks:
            first = len(choices.token_ids)
            own = torch.tensor(output_ids[first : first + logits.shape[0]], device=logits.device).unsqueeze(1)
            choices.token_ids.extend(logits.argmax(dim=-1).tolist())
            top, second = logits.topk(2, dim=-1).values.unbind(1)
            choices.top_logits.extend(top.tolist())
            choices.margins.extend((top - second).tolist())
            choices.gaps.extend((top - logits.gather(1, own).squeeze(1)).tolist())
        return choices

    @torch.inference_mode()
    def margin_noise(self, token_ids: Sequence[int]) -> float:
        """Return the root mean square of how much the margins of a text change with the number of rows in a forward.

        The margin is the difference between the two largest logits. The text is run in chunks, and again with its end
        at most `invariant_rows` rows at a time. The two runs round differently in every layer.
        """
        start = max(1, len(token_ids) - NOISE_ROWS)
        one, other = (
            torch.cat(list(blocks(list(token_ids[:start]), list(token_ids[start:]))))
            for blocks in (self._decoded, self._in_chunks)
        )
        likeliest = one.topk(2, dim=-1).indices
        margins = (logits.gather(1, likeliest).diff(dim=1) for logits in (one, other))
        return float((next(margins) - next(margins)).square().mean().sqrt())

    @torch.inference_mode()
    def require_finite(self, token_ids: Sequence[int]) -> None:
        """Raise UserError if the target's logits are NaN or infinite at some position of a text.

        The argmax is then meaningless, and comparing outputs with plain decoding would not show it.
        """
        for start, logits in self._logits(token_ids):
            num_tokens = getattr(self._target, "num_tokens", None)  # ids behind are padding, with logit -inf
            broken = ~logits[..., :num_tokens].isfinite().all(dim=-1)
            if bool(broken.any()):
                position = start + int(broken.nonzero()[0])
                dtype = str(self._cache.dtype).removeprefix("torch.")
                raise UserError(
                    f"target: its logits become NaN or infinite in dtype={dtype} (at position {position} of a text); "
                    f"{'use dtype=bfloat16 or float32' if dtype == 'float16' else 'use another checkpoint'}"
                )

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the float32 logits [positions, vocab] after each token of a text."""
        return torch.cat([logits for _, logits in self._logits(token_ids)])

    def _logits(self, token_ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the float32 logits [rows, vocab] of successive parts of a text, each with its first position."""
        for start in range(0, len(token_ids), self._chunk_size):
            hidden = self._hidden(list(token_ids[start : start + self._chunk_size]), start)
            for first, rows in enumerate(hidden.split(MOST_LOGIT_ROWS)):
                yield start + first * MOST_LOGIT_ROWS, self._target.logits(rows).float()

    def _in_chunks(self, prompt_ids: list[int], fed_ids: list[int]) -> Iterator[torch.Tensor]:
        """Yield the logits [rows, vocab] after the prompt and after each of `fed_ids`, from chunks of the text."""
        last = len(prompt_ids) - 1
        for start, logits in self._logits([*prompt_ids, *fed_ids]):
            yield logits[max(0, last - start) :]

    def _decoded(self, prompt_ids: list[int], fed_ids: list[int]) -> Iterator[torch.Tensor]:
        """Yield the same logits, computed like plain decoding: a prompt pass, then up to `invariant_rows` rows at a
        time."""
        length, step = len(prompt_ids), self._invariant_rows
        for start in range(0, length, self._chunk_size):
            end = min(start + self._chunk_size, length)
            span = PromptSpan(0, start, end, is_last=end == length)
            spans = (span, *self._rounding.filling((span,), 0))
            attention = build_metadata(self._backend, spans, self._page_table.expand(len(spans), -1))
            kept = self._last_row(span) if span.is_last else Kept(Drop.EVERYTHING)
            unread = [0] * sum(filling.num_rows for filling in spans[1:])
            with self._rounding.products():
                hidden = self._forward([*prompt_ids[start:end], *unread], start, attention, kept)
                logits = self._target.logits(hidden).float() if span.is_last else None
        assert logits is not None, "a prompt has a token"
        yield logits
        for first in range(0, len(fed_ids), step):
            yield self._target.logits(self._hidden(fed_ids[first : first + step], length + first)).float()

    def _last_row(self, span: PromptSpan) -> Kept:
        """Select the row that plain decoding's prompt pass selects (`prune.prefill=last_row`)."""
        device = self._page_table.device
        end = torch.tensor([span.end], device=device)
        attention = self._backend.build((end - 1).unsqueeze(1), end.clone(), self._page_table, span.end)
        live = LiveRows(torch.tensor([span.num_rows - 1], device=device), attention, self._rounding.is_promised)
        return LastPromptRow().in_target(live, FeatureSpec())

    def _hidden(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Return the [rows, hidden_size] hidden states of the chunk that begins at position `start`."""
        device, end = self._page_table.device, start + len(token_ids)
        positions = torch.arange(start, end, device=device).unsqueeze(0)
        attention = self._backend.build(positions, torch.tensor([end], device=device), self._page_table, end)
        return self._forward(token_ids, start, attention, ALL_ROWS)

    def _forward(self, token_ids: list[int], start: int, attention: AttentionMetadata, kept: Kept) -> torch.Tensor:
        """Run a chunk, and return the hidden states [rows, hidden_size] of the selected rows."""
        if start == 0:
            self._states.clear(0)
        device = self._page_table.device
        attention.recurrent = self._states.of_prompts(torch.zeros(1, dtype=torch.int64, device=device))
        ids = torch.tensor(token_ids, device=device)
        return self._target.forward(ids, Pass(self._cache, attention, kept), FeatureSpec()).hidden
