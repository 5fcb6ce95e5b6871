"""A target without ties: every token is a hash of the whole visible prefix, read back from the paged cache.

Each layer writes WIDTH small numbers for (token, position) as its values, and attends with zero queries: the mean of
the visible values, times their number, is an exact sum. So a wrong slot, page, length, window or position, a row that
is stale or poisoned, or a residual of another row changes the next token, and `FakeTarget.continuation` says in plain
Python what it must be. Layer 0 sees a window, layer 1 everything; layer 1 keeps the selected rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.tree import StrictTreeAcceptance
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.attention.torch_tree import TorchTreeAttention
from spec_lab.config.option import get
from spec_lab.core.kept import PrunePolicy
from spec_lab.core.kv_cache import NULL_PAGE, NUM_RESERVED_PAGES, CacheRow, PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import NO_ROUNDING, PromptPack
from spec_lab.core.protocols import Drafter, DrafterRequirements
from spec_lab.core.ragged import attend
from spec_lab.core.types import (
    AttentionMetadata,
    DraftStep,
    FeatureSpec,
    Request,
    TargetOutput,
    VerifiedRound,
)
from spec_lab.drafters.history import LookupState
from spec_lab.drafters.picking import GivenDrafts
from spec_lab.engine.drafts import Chain, Tree
from spec_lab.engine.engine import Engine
from spec_lab.engine.experts_read import ExpertsRead
from spec_lab.engine.graphs.eager import EagerGraph
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.offers import Offers
from spec_lab.engine.pages import PageAllocator, PageTable
from spec_lab.engine.parts import Parts
from spec_lab.engine.plan import LaunchShape
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.rounds import Rounds
from spec_lab.engine.scheduler import Scheduler
from spec_lab.engine.slots import SlotState
from spec_lab.engine.timing import HostTimer

WIDTH = 8
WINDOWS: tuple[int | None, ...] = (5, None)
MODULUS = 1_000_003


class FakeTarget:
    """A target that keeps the protocol `Target`, and counts the rows of each call of `forward` and `logits`."""

    def __init__(
        self, backend: AttentionBackend, vocab_size: int = 61, eos: int = 2, max_positions: int = 4096
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_positions
        self.eos_token_ids = frozenset({eos})
        self.forward_rows: list[int] = []
        self.kept_rows: list[int] = []
        self.logit_rows: list[int] = []
        self.attention: list[AttentionMetadata] = []
        self.backend = backend

    def forward(self, token_ids: torch.Tensor, at: Pass, features: FeatureSpec) -> TargetOutput:
        cache, attention, kept = at.cache, at.metadata, at.kept
        values = values_of(token_ids, attention.positions)
        windowed = self._attend(values, cache, 0, attention)
        self.backend.write(cache.layers[1], attention, torch.ones_like(values), values)
        if kept.is_empty:
            hidden = windowed.new_zeros((0, 2 * WIDTH))
        else:
            row_ids = torch.arange(len(token_ids)).view(-1, 1, 1).expand(-1, 1, WIDTH)
            queries, kept_attention = kept.queries(row_ids, attention)
            sums = self._sums(torch.zeros(queries.shape), cache, 1, kept_attention)
            hidden = torch.cat((kept.residual(windowed), kept.attended(sums)), dim=1)
        self.forward_rows.append(len(token_ids))
        self.kept_rows.append(len(hidden))
        self.attention.append(attention)
        return TargetOutput(hidden, self._features(token_ids, attention, hidden, features))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logit_rows.append(len(hidden))
        # Junk rows may hold NaN: they must not raise, only never be emitted.
        sums = hidden.nan_to_num(0.0).round().long()
        tokens = (sums * torch.arange(3, 3 + 2 * WIDTH)).sum(dim=1) * 7919 % MODULUS % self.vocab_size
        return torch.nn.functional.one_hot(tokens, self.vocab_size).float()

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`, in plain Python and without a stop."""
        text = list(prompt)
        rows = [fake_row(token, position) for position, token in enumerate(text)]
        for _ in range(count):
            windowed = [sum(row[c] for row in rows[-(WINDOWS[0] or 0) :]) for c in range(WIDTH)]
            everything = [sum(row[c] for row in rows) for c in range(WIDTH)]
            weighted = sum(weight * value for weight, value in enumerate(windowed + everything, start=3))
            text.append(weighted * 7919 % MODULUS % self.vocab_size)
            rows.append(fake_row(text[-1], len(text) - 1))
        return text[len(prompt) :]

    def expected(self, request: Request) -> list[int]:
        """What a request must give: its continuation up to EOS or the limit."""
        tokens = self.continuation(request.prompt_ids, request.max_new_tokens)
        stops = [] if request.ignore_eos else [i for i, token in enumerate(tokens) if token in self.eos_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    def _attend(
        self, values: torch.Tensor, cache: PagedKVCache, layer: int, attention: AttentionMetadata
    ) -> torch.Tensor:
        self.backend.write(cache.layers[layer], attention, torch.ones_like(values), values)
        return self._sums(torch.zeros_like(values), cache, layer, attention)

    def _sums(
        self, queries: torch.Tensor, cache: PagedKVCache, layer: int, attention: AttentionMetadata
    ) -> torch.Tensor:
        """[rows, WIDTH] sums over the visible rows, whose number follows from the row's position."""
        window = WINDOWS[layer]
        means = attend(self.backend, queries, cache.layers[layer], attention, window, 1.0)
        num_visible = attention.positions + 1 if window is None else (attention.positions + 1).clamp(max=window)
        return means * num_visible.unsqueeze(1)

    @staticmethod
    def _features(
        token_ids: torch.Tensor, attention: AttentionMetadata, hidden: torch.Tensor, spec: FeatureSpec
    ) -> torch.Tensor | None:
        """[rows, 2 * taps] token and position of each row, for each tap."""
        pair = torch.stack((token_ids, attention.positions), dim=1).float()
        taps = [pair] * len(spec.layer_inputs)
        if spec.final_hidden:
            assert len(hidden) == len(token_ids)
            taps.append(hidden)
        return torch.cat(taps, dim=1) if taps else None


def values_of(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows, 1, WIDTH] numbers below 127, so that float32 sums over some hundred rows are exact."""
    rows = [_mixed(token_ids + 1, positions + 1, channel) for channel in range(WIDTH)]
    return torch.stack(rows, dim=1).float().unsqueeze(1)


def fake_row(token: int, position: int) -> list[int]:
    return [_mixed(token + 1, position + 1, channel) for channel in range(WIDTH)]


def _mixed(token: Any, position: Any, channel: int) -> Any:
    """The same arithmetic for Python integers and for tensors of them."""
    return (token * (2 * channel + 3) * 40503 + position * (2 * channel + 5) * 30011 + token * position * 7919) % 127


class ScriptedDrafter(GivenDrafts):
    """A drafter that knows the continuation; in round r of a request its first `script[r % len(script)]` drafts are
    right.

    `on_catch_up` is called with each verified round, before the drafter takes it.
    """

    requirements = DrafterRequirements()

    def __init__(
        self,
        num_draft_tokens: int,
        target: FakeTarget,
        script: Sequence[int],
        on_catch_up: Callable[[VerifiedRound], None] | None = None,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.on_catch_up = on_catch_up
        self._target = target
        self._script = script
        self._texts: dict[int, list[int]] = {}
        self._drafted: dict[int, int] = {}

    def admit(self, slot: int, request: Request) -> None:
        count = request.max_new_tokens + 2 * self.num_draft_tokens + 1
        self._texts[slot] = [*request.prompt_ids, *self._target.continuation(request.prompt_ids, count)]
        self._drafted[slot] = 0

    def ingest(self, pack: PromptPack) -> LookupState | None:
        ended = [span for span in pack.spans if span.is_last]
        return self._propose([span.slot for span in ended], [span.end + 1 for span in ended]) if ended else None

    def catch_up(self, verified: VerifiedRound) -> LookupState:
        if self.on_catch_up is not None:
            self.on_catch_up(verified)
        lengths = verified.batch.kv_lens + verified.verification.num_emitted + 1
        slots = [
            slot if active else -1
            for slot, active in zip(verified.batch.slot_ids.tolist(), verified.batch.active.tolist(), strict=True)
        ]
        return self._propose(slots, lengths.tolist())

    def step(self, state: LookupState, step: DraftStep) -> None:
        state.tokens = state.proposals.index_select(1, step.column).squeeze(1)

    def _propose(self, slots: list[int], lengths: list[int]) -> LookupState:
        """Drafts after `lengths` known tokens; slot -1 is a padded row."""
        rows = []
        for slot, length in zip(slots, lengths, strict=True):
            if slot < 0:
                rows.append([0] * self.num_draft_tokens)
                continue
            num_right = self._script[self._drafted[slot] % len(self._script)]
            self._drafted[slot] += 1
            known = self._texts[slot][length : length + self.num_draft_tokens]
            known += [0] * (self.num_draft_tokens - len(known))
            wrong = [(token + 1) % self._target.vocab_size for token in known]
            rows.append(known[:num_right] + wrong[num_right:])
        proposals = torch.tensor(rows).view(len(slots), self.num_draft_tokens)
        first = proposals[:, 0] if self.num_draft_tokens else proposals.sum(dim=1)
        return LookupState(first, proposals)


def scripted_rounds(outputs: int, num_draft_tokens: int, script: Sequence[int]) -> list[int]:
    """How many tokens each round of a request with `outputs` output tokens keeps, without the prompt pass's one."""
    emitted: list[int] = []
    while sum(emitted) < outputs - 1:
        num_right = min(script[len(emitted) % len(script)], num_draft_tokens)
        emitted.append(min(num_right + 1, outputs - 1 - sum(emitted)))
    return emitted


class PaddedGraph(EagerGraph):
    """Eager rounds whose batch is rounded up to whole buckets, as a captured mode does it."""

    def __init__(self, bucket: int) -> None:
        super().__init__()
        self._bucket = bucket

    def padded_size(self, num_requests: int) -> int:
        return -(-num_requests // self._bucket) * self._bucket


def make_prune(prefill: str = "all_rows", catchup: str = "none") -> PrunePolicy:
    return PrunePolicy(get("prune.prefill", prefill)().build(), get("prune.catchup", catchup)().build())


def make_fake_engine(
    make_drafter: Callable[[FakeTarget], Drafter[Any]],
    *,
    num_slots: int = 3,
    max_seq_len: int = 64,
    page_size: int = 4,
    num_pages: int | None = None,
    prefill_chunk: int = 512,
    prefill_tokens: int | None = 2048,
    prefill: str = "last_row",
    graph: GraphMode | None = None,
    max_positions: int = 4096,
    vocab_size: int = 61,
    tree_rows: int | None = None,
) -> tuple[Engine, FakeTarget]:
    """An engine on a fake target whose whole cache, the null page left out, starts as NaN; with `tree_rows` its drafter
    drafts trees of so many rows."""
    device = torch.device("cpu")
    backend = (TorchAttention if tree_rows is None else TorchTreeAttention)(page_size, max_positions)
    target = FakeTarget(backend, max_positions=max_positions, vocab_size=vocab_size)
    drafter = make_drafter(target)
    margin = max(2 * drafter.num_draft_tokens, tree_rows or 0)
    if num_pages is None:
        num_pages = num_slots * -(-(max_seq_len + margin) // page_size) + NUM_RESERVED_PAGES
    table = PageTable(num_slots, max_seq_len + margin, page_size, device)
    cache = PagedKVCache([CacheRow((2, 1, WIDTH))] * len(WINDOWS), num_pages, page_size, torch.float32, device)
    cache.kv[:, (NULL_PAGE + 1) * page_size :] = float("nan")
    slots = SlotState(num_slots, drafter.num_draft_tokens if tree_rows is None else tree_rows - 1, table)
    rule = StrictAcceptance() if tree_rows is None else StrictTreeAcceptance()
    parts = Parts(target, drafter, rule, backend, backend, cache, slots, HostTimer(), ExpertsRead(device))
    scheduler = Scheduler(num_slots, PageAllocator(num_pages), page_size, max_seq_len, margin)
    drafts = Chain(parts) if tree_rows is None else Tree(parts, tree_rows, page_size)
    most = drafter.num_draft_tokens
    rounds = Rounds(lambda _: DecodeRound(parts, drafts, Offers(most, most)), LaunchShape(most, most))
    mode = graph or EagerGraph()
    prune = make_prune(prefill)
    prompt_pass = PromptPass(rounds.widest, prune, prefill_chunk, prefill_tokens, NO_ROUNDING)
    engine = Engine(rounds, prune, mode, scheduler, prompt_pass)
    return engine, target
