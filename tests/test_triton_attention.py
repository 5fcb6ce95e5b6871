"""The paged attention kernel against the backend of torch, and its further promise: no bit depends on neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from spec_kernels.attention import _division, paged_attention
from spec_kernels.attention_tiles import MAX_DECODE_QUERIES
from spec_kernels.narrow_kv_reference import narrowed, widened
from spec_lab.attention.torch_tree import TorchTreeAttention
from spec_lab.core.draft_tree import TreeRows
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.types import AttentionMetadata
from tests.covering import each_value
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

SCRATCH_PAGE = 1
SCALE = 0.25
SPLIT = 64


@dataclass
class Paged:
    """A cache with the keys and values of `lens`; every other cell, the scratch page too, holds `garbage`."""

    kv: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    powers: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max())

    def metadata(self, queries: torch.Tensor, tree: TreeRows | None = None) -> AttentionMetadata:
        """Make the metadata of the newest rows of each request, as a backend of torch reads it."""
        unread, num_queries = self.seq_lens, len(queries) // len(self.seq_lens)
        return AttentionMetadata(unread, unread, self.seq_lens, self.page_table, num_queries, self.longest, tree=tree)

    def seen(self, out: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Replace rows that see no key by zeros; to torch they see the first."""
        behind = torch.arange(metadata.num_queries - 1, -1, -1, device=DEVICE)
        is_seen = (self.seq_lens.unsqueeze(1) > behind).flatten()
        return out * is_seen.view(-1, *(1,) * (out.dim() - 1))

    def select(self, requests: list[int]) -> Paged:
        return replace(self, page_table=self.page_table[requests], seq_lens=self.seq_lens[requests])

    def narrowed(self) -> Paged:
        """Put keys and values in e4m3."""
        kv, powers = narrowed(self.kv)
        return replace(self, kv=kv, powers=powers.flatten().view_as(powers))  # of one KV head, with its stride


def fill(
    lens: list[int],
    page_size: int = 16,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    garbage: float = float("nan"),
) -> Paged:
    """Fill a cache whose pages are dealt in a shuffled order."""
    num_columns = -(-(max(lens) + 8) // page_size)
    num_pages = 2 + num_columns * len(lens)
    kv = torch.full((num_pages * page_size, 2, num_kv_heads, head_dim), garbage, dtype=dtype)
    page_table = torch.full((len(lens), num_columns + 1), SCRATCH_PAGE)
    free = (torch.randperm(num_pages - 2, generator=torch.Generator().manual_seed(0)) + 2).tolist()
    rows = randn(sum(lens), 2, num_kv_heads, head_dim, dtype=dtype).cpu()
    for request, length in enumerate(lens):
        for column in range(-(-length // page_size)):
            page_table[request, column] = free.pop()
        positions = torch.arange(length)
        slots = page_table[request, positions // page_size] * page_size + positions % page_size
        first = sum(lens[:request])
        kv[slots] = rows[first : first + length]
    return Paged(kv.to(DEVICE), page_table.to(DEVICE), torch.tensor(lens, device=DEVICE), page_size)


def set_tiles_to_fill(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have so many tiles fill a GPU, whatever was kept of another number."""
    monkeypatch.setattr("spec_kernels.attention.NUM_TILES_TO_FILL", number)
    monkeypatch.setattr("spec_kernels.attention._division", _division.__wrapped__)


def attend(
    paged: Paged,
    queries: torch.Tensor,
    window: int | None = None,
    max_seq_len: int | None = None,
    split: int = SPLIT,
    tree: TreeRows | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel."""
    tables = (paged.kv, paged.page_table, paged.seq_lens, paged.page_size)
    shape = max_seq_len or paged.longest, split, SCALE, window
    rows = () if tree is None else (tree.path_slots, tree.depths, tree.num_tail)
    return paged_attention(queries, *tables, *shape, *rows, sinks=sinks, powers=paged.powers)


def reference(
    paged: Paged,
    queries: torch.Tensor,
    window: int | None = None,
    tree: TreeRows | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in torch, in float32."""
    kv = paged.kv if paged.powers is None else widened(paged.kv, paged.powers, torch.float32)
    cache, metadata = LayerCache(kv.float().nan_to_num(0.0)), paged.metadata(queries, tree)
    backend = TorchTreeAttention(paged.page_size, paged.longest)
    out = backend.attend(queries.float().contiguous(), cache, metadata, window, SCALE, sinks)
    return paged.seen(out, metadata).to(queries.dtype)


@pytest.mark.parametrize(
    ("group", "rows"), each_value([1, 2, 4, 7], [(1, None), (2, 1), (4, 9), (4, None), (16, 20)], times=2)
)
def test_equals_the_backend_of_torch(group: int, rows: tuple[int, int | None]) -> None:
    """Lengths are ragged, on and beside page borders, and shorter than the rows too; all that is no key is NaN."""
    num_queries, window = rows
    lens = [1, 15, 16, 17, 40]
    paged = fill(lens)
    queries = randn(len(lens) * num_queries, 2 * group, 16, seed=1)
    assert_near(attend(paged, queries, window), reference(paged, queries, window))


@pytest.mark.parametrize("window", [None, 1, 66])
@pytest.mark.parametrize(("num_queries", "group"), [(1, 4), (3, 2)])
def test_equals_that_of_torch_on_and_beside_split_borders(num_queries: int, group: int, window: int | None) -> None:
    lens = [64, 65, 66, 130]
    paged = fill(lens, num_kv_heads=1)
    queries = randn(len(lens) * num_queries, group, 16, seed=1)
    assert_near(attend(paged, queries, window), reference(paged, queries, window))


@pytest.mark.parametrize("page_size", [1, 2, 3, 48, 64])
def test_any_page_size(page_size: int) -> None:
    paged = fill([47, 48, 49, 63], page_size)
    queries = randn(8, 4, 16, seed=1)
    assert_near(attend(paged, queries), reference(paged, queries))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_tiles_to_fill", [1, 10**6])
@pytest.mark.parametrize("num_queries", [1, 3, MAX_DECODE_QUERIES + 9])
def test_sinks_take_their_share(
    num_queries: int, num_tiles_to_fill: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole programs, in splits and in prompt chunks; one sink outweighs everything and one nothing."""
    set_tiles_to_fill(monkeypatch, num_tiles_to_fill)
    paged = fill([70, 200])
    queries = randn(2 * num_queries, 4, 16, seed=1)
    sinks = torch.tensor([0.5, 200.0, -200.0, 3.0], device=DEVICE)
    out = attend(paged, queries, window, sinks=sinks)
    assert_near(out, reference(paged, queries, window, sinks=sinks))
    by_head = out.view(-1, 4, 16)
    assert by_head[:, 1].abs().max() == 0
    assert torch.equal(by_head[:, 2], attend(paged, queries, window).view(-1, 4, 16)[:, 2])


@pytest.mark.parametrize(("head_dim", "dtype"), each_value([8, 24, 64, 128, 256, 512], DTYPES, times=2))
def test_any_head_dim_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    paged = fill([13, 70], head_dim=head_dim, dtype=dtype)
    queries = randn(6, 4, head_dim, seed=1, dtype=dtype)
    assert_near(attend(paged, queries), reference(paged, queries))


def test_many_splits_and_windows_that_skip_some() -> None:
    """More splits than are merged at once."""
    lens = [64 * 17 + 5, 64 * 3]
    paged = fill(lens, num_kv_heads=1)
    queries = randn(4, 2, 16, seed=1)
    for window in (None, 100, 1000):
        assert_near(attend(paged, queries, window), reference(paged, queries, window))


@pytest.mark.parametrize(("dtype", "shape"), each_value(DTYPES, [(64, None), (128, None), (64, 100)], times=2))
def test_how_many_programs_share_the_splits_changes_no_bit(
    dtype: torch.dtype, shape: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are many tiles, one program takes all splits of its own."""
    split, window = shape
    paged = fill([9, 300, 128], num_kv_heads=1, head_dim=64, dtype=dtype)
    queries = randn(6, 2, 64, seed=1, dtype=dtype)
    shared = attend(paged, queries, window, split=split)
    assert_near(shared, reference(paged, queries, window))
    set_tiles_to_fill(monkeypatch, 3)
    assert torch.equal(attend(paged, queries, window, split=split), shared)


def test_a_prompt_chunk_is_tiled_over_its_rows() -> None:
    num_queries = MAX_DECODE_QUERIES + 25
    paged = fill([num_queries, 90])
    for window in (None, 11):
        queries = randn(2 * num_queries, 4, 16, seed=1)
        assert_near(attend(paged, queries, window), reference(paged, queries, window))


def test_strided_queries() -> None:
    """The query heads are a view of the rotated query and key heads."""
    paged = fill([13, 70])
    heads = randn(4, 6, 16, seed=1)
    assert torch.equal(attend(paged, heads[:, :4]), attend(paged, heads[:, :4].contiguous()))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -3e38])
def test_what_is_no_key_changes_no_bit(garbage: float) -> None:
    """Past a sequence's end, before every row's window, on unused pages, and past `max_seq_len`."""
    queries = randn(8, 2, 16, seed=1)
    clean, poisoned = (fill([9, 70], num_kv_heads=1, garbage=cell) for cell in (0.0, garbage))
    for window in (None, 6):
        assert torch.equal(attend(poisoned, queries, window, 78), attend(clean, queries, window))
    first = poisoned.page_table[1, 0] * 16
    poisoned.kv[first : first + 16] = garbage
    assert torch.equal(attend(poisoned, queries, 6)[4:], attend(clean, queries, 6)[4:])


def test_a_score_of_a_key_that_a_row_does_not_see_is_dropped_by_selection() -> None:
    """The newest key is NaN: only the row that sees it shows that."""
    paged = fill([40])
    queries = randn(4, 4, 16, seed=1)
    expected = attend(paged, queries)
    paged.kv[paged.page_table[0, 2] * 16 + 39 % 16, 0] = float("nan")
    out = attend(paged, queries)
    assert torch.equal(out[:3], expected[:3]) and out[3].isnan().all()


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    """A padded request of one key with four rows; a window makes no difference."""
    paged = fill([1, 2 * SPLIT], num_kv_heads=1)
    queries = randn(8, 2, 16, seed=1)
    for window in (None, 2):
        for split in (SPLIT, 2 * SPLIT):
            out = attend(paged, queries, window, split=split)
            assert (out[:3] == 0).all() and (out[3] != 0).all() and out.isfinite().all()


def test_rows_past_the_table_are_finite_and_leave_the_others_alone() -> None:
    """Junk rows of a last round: their length is more than there are pages or `max_seq_len` says."""
    paged = fill([40, 40])
    queries = randn(2, 4, 16, seed=1)
    expected = attend(paged, queries)
    paged.seq_lens[1] = 400
    paged.kv.nan_to_num_(0.0)
    out = attend(paged, queries, max_seq_len=200)
    assert torch.equal(out[0], expected[0]) and out.isfinite().all()
    assert torch.equal(attend(paged, queries, max_seq_len=40)[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "window", "head_dim", "is_narrow"), [(4, None, 64, False), (7, 30, 16, False), (4, None, 64, True)]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, group: int, window: int | None, head_dim: int, is_narrow: bool
) -> None:
    """It does not, bit for bit: plain decoding asks for one row at a time, verify for up to 16, which may have higher
    tiles."""
    split, num_queries = 2 * SPLIT if is_narrow else SPLIT, 16
    length = split + 20
    paged = fill([length], num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    paged = paged.narrowed() if is_narrow else paged
    queries = randn(num_queries, group, head_dim, seed=1, dtype=dtype)
    together = attend(paged, queries, window, split=split)
    for first, last in ((0, 1), (15, 16), (3, 7)):
        paged.seq_lens.fill_(length - (num_queries - last))
        assert torch.equal(attend(paged, queries[first:last], window, split=split), together[first:last]), (first, last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_does_not_depend_on_the_batch_or_the_bound(dtype: torch.dtype) -> None:
    """Neither the other requests nor `max_seq_len`, which sets how many splits are launched, changes a bit."""
    paged = fill([9, 150, 70], num_kv_heads=1, dtype=dtype)
    queries = randn(6, 2, 16, seed=1, dtype=dtype)
    together = attend(paged, queries)
    for request in range(3):
        alone = paged.select([request])
        rows = slice(2 * request, 2 * request + 2)
        for bound in (alone.longest, 158):
            assert torch.equal(attend(alone, queries[rows], max_seq_len=bound), together[rows]), (request, bound)
