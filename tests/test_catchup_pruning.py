"""prune.catchup (tokenspeed #217): the same KV, the same drafts, fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.caches import cache_row
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.kv_cache import NULL_PAGE, LayerCache, PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata, DraftStep, FeatureSpec, RoundBatch, Verification, VerifiedRound
from spec_lab.drafters.picking import GreedyPicker
from spec_lab.drafters.recurrent import RecurrentDrafter, RecurrentState
from spec_lab.engine.pages import PageTable
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.mtp import MtpModule
from tests.covering import each_value
from tests.fake_target import make_prune
from tests.lab import make_pair

KNOB = ("none", "post_attention", "pre_attention")
PAGE_SIZE, MAX_SEQ_LEN = 4, 80
HIDDEN, VOCAB = 32, 160


class Heads(Protocol):
    """Makes draft heads with the same weights each time."""

    def head(self, backend: AttentionBackend, window: int | None) -> Eagle3Head | MtpModule: ...


@dataclass
class Models:
    pair: tuple[Path, Path]

    def head(self, backend: AttentionBackend, window: int | None) -> Eagle3Head:
        config = read_model_config(self.pair[0])
        target = dict(open_tensors(self.pair[0], decoder_tensor_shapes(config), torch.float32, "cpu"))
        head_config, tensors = load_eagle3(self.pair[1], config, torch.float32, "cpu")
        embedding, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        return Eagle3Head(head_config, tensors, embedding, head, backend, MAX_SEQ_LEN, window)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(make_pair(tmp_path_factory.mktemp("pair")))


@dataclass
class Lane:
    """One drafter with its cache, for requests of the given L and padded rows after them."""

    drafter: RecurrentDrafter
    cache: LayerCache
    table: PageTable
    kv_lens: torch.Tensor
    num_padded: int

    def verified(self, tokens: torch.Tensor, features: torch.Tensor, num_emitted: list[int]) -> VerifiedRound:
        """A verified round of every request: tokens [requests, N], features [requests * N, 3 * HIDDEN], and junk in
        padded rows.
        """
        num_rows = tokens.shape[1]
        scratch = [self.table.scratch_slot] * self.num_padded
        slot_ids = torch.tensor([*range(len(self.kv_lens)), *scratch])
        padded_tokens = torch.cat((tokens, tokens.new_zeros(self.num_padded, num_rows)))
        padded_features = torch.cat((features, torch.ones(self.num_padded * num_rows, features.shape[1])))
        counts = torch.tensor(num_emitted + [0] * self.num_padded)
        batch = RoundBatch(
            slot_ids=slot_ids,
            active=counts > 0,
            kv_lens=torch.cat((self.kv_lens, self.kv_lens.new_zeros(self.num_padded))),
            input_ids=padded_tokens,
            page_table=self.table.pages[slot_ids],
            max_kv_len=int(self.kv_lens.max()),
        )
        return VerifiedRound(batch, Verification(padded_tokens, counts), padded_features)

    def rows(self, upto: torch.Tensor) -> list[torch.Tensor]:
        """The KV rows of each request at positions below `upto`."""
        return [
            self.cache.kv[self.table.pages[slot].repeat_interleave(PAGE_SIZE)[:end] * PAGE_SIZE + offsets(end)]
            for slot, end in enumerate(upto.tolist())
        ]


def offsets(count: int) -> torch.Tensor:
    return torch.arange(count) % PAGE_SIZE


def make_lane(
    models: Heads,
    catchup: str,
    kv_lens: list[int],
    num_draft_tokens: int = 3,
    num_padded: int = 0,
    backend: AttentionBackend | None = None,
    window: int | None = None,
) -> Lane:
    """Every lane starts from the same random KV below L, and NaN above it."""
    backend = backend or TorchAttention(PAGE_SIZE, MAX_SEQ_LEN)
    columns, device = MAX_SEQ_LEN // PAGE_SIZE, torch.device("cpu")
    num_pages = 2 + columns * len(kv_lens)
    table = PageTable(len(kv_lens), MAX_SEQ_LEN, PAGE_SIZE, device)
    head = models.head(backend, window)
    row = cache_row(head.config.layer.only_layer)
    cache = PagedKVCache([row], num_pages, PAGE_SIZE, torch.float32, device).layers[0]
    cache.kv[(NULL_PAGE + 1) * PAGE_SIZE :] = float("nan")
    generator = torch.Generator().manual_seed(3)
    for slot, length in enumerate(kv_lens):
        table.assign(slot, list(range(2 + slot, num_pages, len(kv_lens))))
        slots = table.pages[slot].repeat_interleave(PAGE_SIZE)[:length] * PAGE_SIZE + offsets(length)
        cache.kv[slots] = torch.randn(length, *row.shape, generator=generator)
    drafter = RecurrentDrafter(
        num_draft_tokens=num_draft_tokens,
        head=head,
        features=FeatureSpec((2, 4, 5)),
        cache=cache,
        backend=backend,
        prune=make_prune(catchup=catchup),
        picker=GreedyPicker(),
    )
    return Lane(drafter, cache, table, torch.tensor(kv_lens), num_padded)


@dataclass
class Drafted:
    """What one round of a drafter gave: hidden and logits of draft 1, and all drafts."""

    hidden: torch.Tensor
    logits: torch.Tensor
    drafts: torch.Tensor
    catchup_rows: list[torch.Tensor]


@torch.inference_mode()
def draft(lane: Lane, verified: VerifiedRound) -> Drafted:
    state = lane.drafter.catch_up(verified)
    num_requests, num_rows = len(lane.kv_lens), verified.verification.tokens.shape[1]
    hidden = state.hidden[:num_requests].clone()
    rows = [kv.clone() for kv in lane.rows(lane.kv_lens + num_rows)]
    drafts = [state.tokens[:num_requests]]
    for index in range(1, lane.drafter.num_draft_tokens):
        lane.drafter.backend.advance(state.attention)
        lane.drafter.step(state, DraftStep(index, torch.tensor([index])))
        drafts.append(state.tokens[:num_requests])
    return Drafted(hidden, lane.drafter.head.draft_logits(hidden), torch.stack(drafts, dim=1), rows)


def random_round(num_requests: int, num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (num_requests, num_rows), generator=generator)
    return tokens, torch.randn(num_requests * num_rows, 3 * HIDDEN, generator=generator)


def assert_same(got: Drafted, expected: Drafted) -> None:
    for ours, theirs in zip(got.catchup_rows, expected.catchup_rows, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, theirs), "KV rows of the catch-up are bit-equal"
    torch.testing.assert_close(got.hidden, expected.hidden, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    assert torch.equal(got.drafts, expected.drafts)


def assert_pruning_changes_nothing(
    lanes: dict[str, Lane], tokens: torch.Tensor, features: torch.Tensor, num_emitted: list[int]
) -> None:
    """Let all lanes draft behind the same round: caches are bit-equal, and drafts equal."""
    drafted = {knob: draft(lane, lane.verified(tokens, features, num_emitted)) for knob, lane in lanes.items()}
    assert_same(drafted["post_attention"], drafted["none"])
    assert_same(drafted["pre_attention"], drafted["none"])


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_padded", "window"), each_value([1, 3, 5], [0, 3], [None, 1, 5], times=2)
)
def test_every_n_mixed_in_one_batch(models: Models, num_draft_tokens: int, num_padded: int, window: int | None) -> None:
    """Requests with n = 1..N at and beside page borders run beside padded rows with n = 0."""
    num_rows = num_draft_tokens + 1
    kv_lens = [1, 4, 7, 16, 31, 12][:num_rows]
    lanes = {knob: make_lane(models, knob, kv_lens, num_draft_tokens, num_padded, window=window) for knob in KNOB}
    tokens, features = random_round(num_rows, num_rows)
    for num_emitted in (list(range(1, num_rows + 1)), list(range(num_rows, 0, -1))):
        assert_pruning_changes_nothing(lanes, tokens, features, num_emitted)


def test_rounds_in_a_row_with_other_n(models: Models) -> None:
    """Each round meets the recurrent rows and the rejected tail that the one before left."""
    lanes = {knob: make_lane(models, knob, [3, 8, 13, 22], num_padded=1) for knob in KNOB}
    for seed, num_emitted in enumerate(([1, 2, 3, 4], [4, 1, 1, 2], [2, 4, 3, 1], [1, 1, 4, 4])):
        tokens, features = random_round(4, 4, seed)
        assert_pruning_changes_nothing(lanes, tokens, features, num_emitted)
        for lane in lanes.values():
            lane.kv_lens = lane.kv_lens + torch.tensor(num_emitted)


@pytest.mark.parametrize("knob", KNOB)
def test_a_row_that_emitted_nothing_may_stand_first(models: Models, knob: str) -> None:
    """As in a warm-up of padded rows only: n = 0 has no live row, and its stand-in must be a row of the batch."""
    tokens, features = random_round(2, 4)
    lanes = [make_lane(models, knob, [5, 9]) for _ in range(2)]
    active, inactive = (
        draft(lane, lane.verified(tokens, features, num_emitted))
        for lane, num_emitted in zip(lanes, ([2, 3], [0, 3]), strict=True)
    )
    assert torch.equal(active.hidden[1], inactive.hidden[1]) and torch.equal(active.drafts[1], inactive.drafts[1])


class PoisonedTail(TorchAttention):
    """After the catch-up's KV write, fills the slots past L + n of each request with NaN."""

    def __init__(self, num_emitted: list[int]) -> None:
        super().__init__(PAGE_SIZE, MAX_SEQ_LEN)
        self._num_emitted = torch.tensor(num_emitted)

    def write(self, cache: LayerCache, metadata: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().write(cache, metadata, keys, values)
        if metadata.num_queries > 1:
            rejected = torch.arange(metadata.num_queries) >= self._num_emitted.unsqueeze(1)
            cache.kv[metadata.slot_mapping[rejected.flatten()]] = float("nan")


def test_the_live_query_does_not_see_the_rejected_tail(models: Models) -> None:
    kv_lens, num_emitted = [5, 9, 14, 20], [1, 2, 3, 4]
    tokens, features = random_round(4, 4)
    clean, poisoned = (
        make_lane(models, "pre_attention", kv_lens, backend=backend)
        for backend in (TorchAttention(PAGE_SIZE, MAX_SEQ_LEN), PoisonedTail(num_emitted))
    )
    expected = draft(clean, clean.verified(tokens, features, num_emitted))
    got = draft(poisoned, poisoned.verified(tokens, features, num_emitted))
    assert not got.catchup_rows[0].isfinite().all(), "the poison was there"
    assert torch.equal(got.hidden, expected.hidden) and torch.equal(got.drafts, expected.drafts)


class Untrimmed(TorchAttention):
    """A pruning that asks a lone query at L + N keys, where the contract says L + n."""

    def __init__(self, excess: list[int]) -> None:
        super().__init__(PAGE_SIZE, MAX_SEQ_LEN)
        self._excess = torch.tensor(excess)

    def build(
        self, positions: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        trim = self._excess if positions.shape[1] == 1 else 0
        return super().build(positions, seq_lens + trim, page_table, max_seq_len + 4)


def test_without_the_trim_the_result_differs(models: Models) -> None:
    """So the tests above would notice: all rows differ but the one with n = N, where nothing is trimmed."""
    kv_lens, num_emitted = [5, 9, 14, 20], [1, 2, 3, 4]
    tokens, features = random_round(4, 4)
    lanes = [
        make_lane(models, "pre_attention", kv_lens, num_draft_tokens=3, backend=backend)
        for backend in (TorchAttention(PAGE_SIZE, MAX_SEQ_LEN), Untrimmed([4 - n for n in num_emitted]))
    ]
    trimmed, untrimmed = (draft(lane, lane.verified(tokens, features, num_emitted)).hidden for lane in lanes)
    difference = (trimmed - untrimmed).abs().amax(dim=1)
    assert (difference[:3] > 1e-3).all() and difference[3] < 1e-5


@pytest.mark.parametrize("knob", KNOB)
def test_the_live_row_is_n_minus_1_of_the_request(models: Models, knob: str) -> None:
    """Changing a feature moves draft 1 of its request when its row is live or before, and of no other request."""
    kv_lens, num_emitted = [5, 9, 14, 20], [1, 2, 3, 4]
    tokens, features = random_round(4, 4)

    def hidden(features: torch.Tensor) -> torch.Tensor:
        lane = make_lane(models, knob, kv_lens)
        return draft(lane, lane.verified(tokens, features, num_emitted)).hidden

    before = hidden(features)
    for row in range(16):
        changed = features.clone()
        changed[row] += 1.0
        moved = ((hidden(changed) - before).abs().amax(dim=1) > 1e-4).tolist()
        request, j = divmod(row, 4)
        assert moved == [other == request and j < num_emitted[request] for other in range(4)], row


def counting(function: Callable[..., torch.Tensor], counts: list[int]) -> Callable[..., torch.Tensor]:
    """Wrap `function` so that it notes the rows of its first argument."""

    def counted(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(rows))
        return function(rows, *rest)

    return counted


def test_rows_past_the_kv_write(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """`none` carries N rows a request through the layer, the others one; queries are cut before or after attention."""
    carried: dict[str, tuple[int, int, int]] = {}
    for knob in KNOB:
        lane = make_lane(models, knob, [5, 9])
        head: Any = lane.drafter.head
        backend: Any = lane.drafter.backend
        attended: list[int] = []
        mlp_rows: list[int] = []
        monkeypatch.setattr(backend, "attend", counting(backend.attend, attended))
        monkeypatch.setattr(head.layer.finish, "part", counting(head.layer.finish.part, mlp_rows))
        tokens, features = random_round(2, 4)
        with torch.inference_mode():
            state = lane.drafter.catch_up(lane.verified(tokens, features, [2, 3]))
        assert isinstance(state, RecurrentState) and len(state.tokens) == len(state.hidden) == 2
        carried[knob] = (attended[0], mlp_rows[0], len(attended))
    assert carried == {"none": (8, 8, 1), "post_attention": (8, 2, 1), "pre_attention": (2, 2, 1)}
