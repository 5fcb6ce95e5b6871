"""The torch backend against a loop over requests and rows, and its metadata against the index contract."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.kv_cache import NULL_PAGE, SCRATCH_PAGE, CacheRow, PagedKVCache, cache_slots
from spec_lab.core.types import AttentionMetadata, RoundBatch, Verification, VerifiedRound
from spec_lab.drafters.catchup import plan_catchup
from spec_lab.engine.pages import PageTable

NUM_KV_HEADS, HEAD_DIM = 2, 8
MAX_SEQ_LEN, MAX_POSITIONS = 30, 32
SCALE = 0.3
WINDOWS = (None, 1, 3, 17)


@dataclass
class Filled:
    """A cache in which each request has `lens` keys and values, and everything else is NaN."""

    backend: TorchAttention
    table: PageTable
    cache: PagedKVCache
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    page_size: int

    def positions(self, num_queries: int) -> torch.Tensor:
        """The last `num_queries` positions of each request."""
        lens = torch.tensor([len(keys) for keys in self.keys])
        return lens.unsqueeze(1) - num_queries + torch.arange(num_queries)

    def metadata(self, num_queries: int, spare: int = 0) -> AttentionMetadata:
        lens = [len(keys) for keys in self.keys]
        pages = self.table.pages[: len(lens)]
        return self.backend.build(self.positions(num_queries), torch.tensor(lens), pages, max(lens) + spare)


def fill(lens: list[int], page_size: int, seed: int = 0, garbage: float = float("nan")) -> Filled:
    """Pages are dealt in a shuffled order, so that neighbours in a request are none in the cache."""
    generator = torch.Generator().manual_seed(seed)
    device = torch.device("cpu")
    num_columns = -(-MAX_SEQ_LEN // page_size)
    num_pages = 2 + num_columns * len(lens)
    table = PageTable(len(lens), MAX_SEQ_LEN, page_size, device)
    cache = PagedKVCache([CacheRow((2, NUM_KV_HEADS, HEAD_DIM))], num_pages, page_size, torch.float32, device)
    cache.kv[:, (NULL_PAGE + 1) * page_size :] = garbage
    backend = TorchAttention(page_size, MAX_POSITIONS)
    free = (torch.randperm(num_pages - 2, generator=generator) + 2).tolist()
    keys, values = [], []
    for slot, length in enumerate(lens):
        table.assign(slot, [free.pop() for _ in range(num_columns)])
        shape = (length, NUM_KV_HEADS, HEAD_DIM)
        keys.append(torch.randn(shape, generator=generator))
        values.append(torch.randn(shape, generator=generator))
        slots = cache_slots(table.pages[slot : slot + 1], torch.arange(length).unsqueeze(0), page_size)[0]
        cache.kv[0, slots] = torch.stack((keys[-1], values[-1]), dim=1)
    return Filled(backend, table, cache, keys, values, page_size)


def naive(filled: Filled, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention as [rows, num_heads * head_dim], computed for one row, head and request at a time."""
    num_queries, num_heads = len(queries) // len(filled.keys), queries.shape[1]
    out = torch.zeros(queries.shape)
    for row in range(len(queries)):
        request, j = divmod(row, num_queries)
        end = len(filled.keys[request]) - (num_queries - 1 - j)
        start = 0 if window is None else max(0, end - window)
        for head in range(num_heads):
            kv_head = head // (num_heads // NUM_KV_HEADS)
            scores = filled.keys[request][start:end, kv_head] @ queries[row, head] * SCALE
            out[row, head] = scores.softmax(0) @ filled.values[request][start:end, kv_head]
    return out.flatten(1)


def attend(filled: Filled, queries: torch.Tensor, metadata: AttentionMetadata, window: int | None) -> torch.Tensor:
    return filled.backend.attend(queries, filled.cache.layers[0], metadata, window, SCALE)


def random_queries(rows: int, num_heads: int = 4) -> torch.Tensor:
    return torch.randn(rows, num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("window", [*WINDOWS, 100])
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("num_heads", [2, 4, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equals_a_loop_over_requests(page_size: int, num_heads: int, num_queries: int, window: int | None) -> None:
    """Ragged lengths on and beside page borders; all that is not a key of the request is NaN."""
    filled = fill([4, 17, 16, 5, 30], page_size)
    queries = random_queries(5 * num_queries, num_heads)
    out = attend(filled, queries, filled.metadata(num_queries, spare=3), window)
    torch.testing.assert_close(out, naive(filled, queries, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30, 1e4])
def test_what_lies_past_the_end_changes_no_bit(garbage: float) -> None:
    """Masked values are zeroed by selection, not by multiplication: NaN times zero is NaN."""
    queries = random_queries(8)
    clean, poisoned = fill([9, 22], 4, garbage=0.0), fill([9, 22], 4, garbage=garbage)
    for window in (None, 6):
        expected = attend(clean, queries, clean.metadata(4, spare=8), window)
        assert torch.equal(attend(poisoned, queries, poisoned.metadata(4, spare=8), window), expected)
        assert expected.isfinite().all()


def test_write_puts_row_i_into_slot_i_and_nowhere_else() -> None:
    filled = fill([9, 22], 4, garbage=0.0)
    metadata = filled.metadata(3)
    before = filled.cache.kv.clone()
    rows = torch.arange(6 * NUM_KV_HEADS * HEAD_DIM).float().view(6, NUM_KV_HEADS, HEAD_DIM)
    filled.backend.write(filled.cache.layers[0], metadata, rows, -rows)
    for row, slot in enumerate(metadata.slot_mapping.tolist()):
        assert torch.equal(filled.cache.kv[0, slot], torch.stack((rows[row], -rows[row])))
    before[0, metadata.slot_mapping] = filled.cache.kv[0, metadata.slot_mapping]
    assert torch.equal(filled.cache.kv, before)
    assert metadata.slot_mapping.tolist() == [
        slot
        for request, first in ((0, 6), (1, 19))
        for slot in cache_slots(filled.table.pages[request : request + 1], torch.arange(first, first + 3)[None], 4)[0]
    ]


def test_past_the_end_the_position_is_clamped_and_the_write_goes_to_scratch() -> None:
    filled = fill([10], 4)
    positions = torch.tensor([[-3, -1, 0, 31, 32, 40]])
    metadata = filled.backend.build(positions, torch.tensor([41]), filled.table.pages[:1], 41)
    assert metadata.positions.tolist() == [0, 0, 0, 31, 31, 31]
    pages = (metadata.slot_mapping // 4).tolist()
    assert (
        pages
        == [SCRATCH_PAGE, SCRATCH_PAGE, int(filled.table.pages[0, 0]), int(filled.table.pages[0, 7])]
        + [SCRATCH_PAGE] * 2
    )


def test_a_padded_row_sees_one_key_of_scratch_and_gives_a_number() -> None:
    """A padded row has n = 0, and the trimmed length is never under 1."""
    filled = fill([10], 4, garbage=0.5)
    scratch_row = filled.table.pages[filled.table.scratch_slot :]
    for num_queries in (1, 4):
        positions = torch.arange(-num_queries, 0).unsqueeze(0)
        metadata = filled.backend.build(positions, torch.tensor([0]), scratch_row, 20)
        assert metadata.seq_lens.tolist() == [1]
        assert set((metadata.slot_mapping // 4).tolist()) == {SCRATCH_PAGE}
        for window in (None, 2):
            assert attend(filled, random_queries(num_queries), metadata, window).isfinite().all()


def assert_same_metadata(got: AttentionMetadata, expected: AttentionMetadata) -> None:
    for name in ("positions", "slot_mapping", "seq_lens", "read_slots"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.masks.keys() == expected.masks.keys()
    for key, mask in expected.masks.items():
        assert torch.equal(got.masks[key], mask), key


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.integers(1, 28), min_size=1, max_size=4),
    steps=st.integers(1, 5),
    page_size=st.sampled_from([1, 4, 16]),
    warm=st.booleans(),
    window=st.sampled_from(WINDOWS),
)
def test_advance_equals_build_at_the_next_position(
    lens: list[int], steps: int, page_size: int, warm: bool, window: int | None
) -> None:
    """Over page borders and past the cache's end, in place, whether the derived tensors were there already or not."""
    filled = fill(lens, page_size, garbage=0.0)
    pages = filled.table.pages[: len(lens)]
    queries = {num_heads: random_queries(len(lens), num_heads) for num_heads in (2, 4)}

    def build(offset: int) -> AttentionMetadata:
        seq_lens = torch.tensor(lens) + offset
        return filled.backend.build((seq_lens - 1).unsqueeze(1), seq_lens, pages, max(lens) + steps)

    def touch(metadata: AttentionMetadata) -> list[torch.Tensor]:
        return [attend(filled, queries[n], metadata, w) for n, w in ((2, None), (4, None), (4, window))]

    metadata = build(0)
    if warm:
        touch(metadata)
    addresses = {name: getattr(metadata, name).data_ptr() for name in ("positions", "slot_mapping", "seq_lens")}
    for step in range(1, steps + 1):
        filled.backend.advance(metadata)
        expected = build(step)
        for got, fresh in zip(touch(metadata), touch(expected), strict=True):
            assert torch.equal(got, fresh)
        assert_same_metadata(metadata, expected)
    assert addresses == {name: getattr(metadata, name).data_ptr() for name in addresses}


def test_advance_leaves_the_length_of_others_alone() -> None:
    """Metadata is advanced in place: it must not share `seq_lens` with what it was built from."""
    filled = fill([5], 4)
    seq_lens = torch.tensor([5])
    metadata = filled.backend.build(torch.tensor([[4]]), seq_lens, filled.table.pages[:1], 8)
    filled.backend.advance(metadata)
    assert seq_lens.tolist() == [5] and metadata.seq_lens.tolist() == [6]


@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_live_row_of_a_catchup_moves_like_metadata_built_anew(
    page_size: int, window: int | None, first_position: int
) -> None:
    """After j draft steps, over page borders, for rows that emitted 1..N tokens and for padded ones, of none."""
    kv_lens, num_emitted, num_draft_tokens = [3, 7, 15, 20, 0, 0], [1, 2, 3, 4, 0, 0], 3
    filled = fill([1] * 4, page_size, garbage=0.0)
    scratch = filled.table.scratch_slot
    slot_ids = torch.tensor([0, 1, 2, 3, scratch, scratch])
    batch = RoundBatch(
        slot_ids=slot_ids,
        active=slot_ids != scratch,
        kv_lens=torch.tensor(kv_lens),
        input_ids=torch.zeros(6, 4, dtype=torch.int64),
        page_table=filled.table.pages[slot_ids],
        max_kv_len=20,
    )
    verified = VerifiedRound(batch, Verification(batch.input_ids, torch.tensor(num_emitted)), None)
    live = plan_catchup(verified, filled.backend, num_draft_tokens, first_position=first_position).live_attention
    queries = random_queries(6)
    for step in range(num_draft_tokens):
        if step:
            filled.backend.advance(live)
        lens = torch.tensor([3 + 1, 7 + 2, 15 + 3, 20 + 4, 1, 1]) + first_position + step
        anew = filled.backend.build((lens - 1).unsqueeze(1), lens, batch.page_table, live.max_seq_len)
        assert torch.equal(attend(filled, queries, live, window), attend(filled, queries, anew, window))
        assert_same_metadata(live, anew)
        assert live.max_seq_len >= int(live.seq_lens.max())
