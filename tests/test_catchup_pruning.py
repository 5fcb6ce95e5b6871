"""prune.catchup (tokenspeed #217): the same KV, the same drafts, fewer rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
from spec_lab.core.types import DraftStep, FeatureSpec, RoundBatch, Verification, VerifiedRound
from spec_lab.drafters.picking import GreedyPicker
from spec_lab.drafters.recurrent import RecurrentDrafter
from spec_lab.engine.pages import PageTable
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.mtp import MtpModule
from tests.covering import each_value
from tests.fake_target import make_prune

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
def models(pair: tuple[Path, Path]) -> Models:
    return Models(pair)


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
