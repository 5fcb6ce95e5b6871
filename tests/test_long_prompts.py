"""Attention of chunks far behind a prompt's start: pieces of few sizes, merged to what one softmax gives."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.merge_pieces import merge_pieces_reference
from spec_lab.attention import long_prompts
from spec_lab.attention.long_prompts import attend_by_cudnn, attend_long_chunk, pieces_before, rows_to_plan
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.attention.triton_backend import TritonAttention
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.prompts import PromptSpan
from spec_lab.core.ragged import build_metadata
from spec_lab.core.types import AttentionMetadata

PAGE = 3


def attend_by_formula(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(group, dim=1).transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ values.repeat_interleave(group, dim=1), scores.logsumexp(-1)


def chunk(start: int, end: int) -> AttentionMetadata:
    """Make the metadata of a chunk whose pages are shuffled, and one more than needed."""
    num_pages = end // PAGE + 1
    draw = torch.Generator().manual_seed(end)
    pages = torch.cat((torch.randperm(num_pages, generator=draw) + 2, torch.tensor([1])))
    return build_metadata(TorchAttention(PAGE, 512), (PromptSpan(0, start, end, is_last=False),), pages.unsqueeze(0))


def fill(metadata: AttentionMetadata) -> LayerCache:
    """Fill a cache with keys and values; what lies behind them is NaN."""
    num_pages = metadata.page_table.shape[1] + 1
    kv = torch.full((num_pages * PAGE, 2, 2, 16), float("nan"))
    positions = torch.arange(int(metadata.seq_lens))
    slots = metadata.page_table[0, positions // PAGE] * PAGE + positions % PAGE
    kv[slots] = 3 * torch.randn(len(slots), 2, 2, 16, generator=torch.Generator().manual_seed(0))
    kv[:PAGE] = 0.0
    return LayerCache(kv)


@pytest.mark.parametrize(
    ("num_rows", "num_before", "num_planned"), [(4, 0, 4), (4, 4, 4), (4, 28, 4), (8, 40, 8), (5, 16, 8), (7, 0, 16)]
)
def test_pieces_merge_to_the_attention_of_all_keys(num_rows: int, num_before: int, num_planned: int) -> None:
    """Last chunks are filled up, and what is filled in changes nothing."""
    metadata = chunk(num_before, num_before + num_rows)
    cache = fill(metadata)
    queries = torch.randn(num_rows, 6, 16, generator=torch.Generator().manual_seed(1))[:, :4]
    out = attend_long_chunk(queries, cache, metadata, PAGE, 0.5, attend_by_formula, merge_pieces_reference, num_planned)
    expected = TorchAttention(PAGE, 512).attend(queries, cache, metadata, None, 0.5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_pieces_are_of_few_sizes() -> None:
    """Every new size costs the library a plan."""
    sizes = set()
    for num_before in range(0, 131_072, 2048):
        pieces = list(pieces_before(num_before))
        assert [first for first, _ in pieces] == [sum(size for _, size in pieces[:i]) for i in range(len(pieces))]
        assert sum(size for _, size in pieces) == num_before
        sizes |= {size for _, size in pieces}
    assert sizes == {2048 << power for power in range(6)}


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (8192, 10_240, 2048),
        (20 * 512, 21 * 512, 512),
        (0, 8192, 8192),
        (0, 6500, 0),
        (0, 7680, 0),
        (0, 2048, 0),
        (6144, 8192, 0),
        (24_576, 32_000, 7680),
        (24_576, 24_576 + 512 * 9, 512 * 9),
        (8192, 8192 + 3000, 0),
        (24_576, 25_000, 0),
        (24_000, 32_000, 0),
    ],
)
def test_which_chunks_are_long_and_how_far_they_are_filled_up(start: int, end: int, expected: int) -> None:
    """Chunks far behind a prompt's start, and first chunks of many rows; of prompts that end soon, none."""
    assert rows_to_plan(chunk(start, end), 128) == rows_to_plan(chunk(start, end), 64) == expected
    assert rows_to_plan(chunk(start, end), 256) == 0, "wider heads have no such kernel"
    metadata = chunk(start, end)
    metadata.known_len = None
    assert rows_to_plan(metadata, 128) == 0, "a round's lengths are on the device"


def test_the_backend_leaves_long_chunks_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not leave it those of layers with a window."""
    monkeypatch.setattr(long_prompts, "MIN_KEYS_BEFORE", 8)
    monkeypatch.setattr(long_prompts, "ROW_UNIT", 4)
    asked = []

    def piece(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(args[3])
        return attend_by_formula(*args)  # type: ignore[arg-type]

    metadata = chunk(12, 16)
    cache = fill(metadata)
    queries = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1))
    backend = TritonAttention(PAGE, 512, attend_piece=piece)
    out = backend.attend(queries, cache, metadata, None, 0.5)
    assert asked == [True, False, False]
    expected = TorchAttention(PAGE, 512).attend(queries, cache, metadata, None, 0.5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert backend.attend(queries, cache, metadata, 5, 0.5).isfinite().all() and len(asked) == 3


@pytest.mark.gpu
@pytest.mark.parametrize(("start", "end"), [(0, 4096), (8192, 10_240), (16_384, 17_000), (24_576, 28_672)])
def test_the_library_attends_as_the_kernel_does_on_a_gpu(start: int, end: int) -> None:
    backends = [TritonAttention(16, 65_536, attend_piece=piece) for piece in (attend_by_cudnn, None)]
    num_pages = -(-end // 16)
    pages = torch.cat((torch.randperm(num_pages) + 2, torch.tensor([1]))).cuda().unsqueeze(0)
    kv = torch.randn((num_pages + 2) * 16, 2, 2, 128, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(end - start, 8, 128, device="cuda", dtype=torch.bfloat16)
    metadata = build_metadata(backends[0], (PromptSpan(0, start, end, is_last=True),), pages)
    assert rows_to_plan(metadata, 128) > 0
    outs = [backend.attend(queries, LayerCache(kv), metadata, None, 128**-0.5) for backend in backends]
    assert not torch.equal(*outs), "two kernels"
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-3)
