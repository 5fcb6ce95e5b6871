"""attention=triton against attention=torch: metadata, its steps in place, and the tokens of a whole engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_lab.attention.stale import StaleMover
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.attention.triton_backend import TritonAttention
from spec_lab.config.choices import Dtype
from spec_lab.config.run import CacheConfig, Run
from spec_lab.core.kernel_set import TORCH_FORMS
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata
from spec_lab.engine.pages import PageTable
from tests.kernel_lab import DEVICE, assert_near, randn
from tests.lab import Reference, generate, make_config, make_pair, part, random_requests

MAX_SEQ_LEN, MAX_POSITIONS = 30, 32
LENS = (1, 4, 11, 12, 27, 30)


def make_table(page_size: int, num_slots: int = len(LENS)) -> PageTable:
    table = PageTable(num_slots, MAX_SEQ_LEN, page_size, DEVICE)
    num_columns = table.pages.shape[1] - 1
    pages = (torch.randperm(num_columns * num_slots, generator=torch.Generator().manual_seed(0)) + 2).tolist()
    for slot in range(num_slots):
        table.assign(slot, pages[slot * num_columns : (slot + 1) * num_columns])
    return table


def last_rows(
    backend: AttentionBackend, table: PageTable, lens: torch.Tensor, num_queries: int, bound: int
) -> AttentionMetadata:
    """The newest rows of each slot; the last request is a padded row of no length."""
    positions = lens.unsqueeze(1) - num_queries + torch.arange(num_queries, device=DEVICE)
    return backend.build(positions, lens, table.pages[: len(lens)], bound)


def padded(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([*lens, 0], device=DEVICE)


@pytest.mark.parametrize("page_size", [1, 4])
def test_stale_windows_are_those_of_step_1_and_all_else_is_fresh(page_size: int) -> None:
    """With a window of 5 every step sees the five keys up to that of step 1; without one, all up to its own. The steps
    go over page borders, with a padded row among them."""
    table = make_table(page_size)
    cache = LayerCache(randn((2 + table.pages.numel()) * page_size, 2, 2, 16))
    lens = padded(LENS[:4])
    for backend in (TritonAttention(page_size, MAX_POSITIONS), TorchAttention(page_size, MAX_POSITIONS)):
        metadata = last_rows(backend, table, lens, 1, MAX_SEQ_LEN)
        mover = StaleMover(backend)
        for step in range(1, 5):
            mover.advance(metadata)
            fresh, first = (last_rows(backend, table, lens.clamp(min=1) + moved, 1, MAX_SEQ_LEN) for moved in (step, 1))
            for name in ("positions", "slot_mapping", "seq_lens"):
                assert torch.equal(getattr(metadata, name), getattr(fresh, name)), name
            queries = randn(len(lens), 4, 16, seed=step)
            for window, expected in ((None, fresh), (5, first)):
                out = backend.attend(queries, cache, metadata, window, 0.3)
                plain = replace(expected, read_slots=None, masks={})
                assert_near(out, TorchAttention(page_size, MAX_POSITIONS).attend(queries, cache, plain, window, 0.3))


def test_the_option_makes_the_backend() -> None:
    run = Run(device=DEVICE.type, dtype=Dtype.float32)
    assert isinstance(part("attention", "triton").build(run, TORCH_FORMS, 64), TritonAttention)


def test_an_engine_gives_the_tokens_of_the_torch_backend(tmp_path: Path) -> None:
    """Prompts on both sides of a chunk and of a page, ragged ends, a target with a window in half of its layers."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    pair = make_pair(tmp_path, "qwen2", vocab_size=24, **window)
    requests = random_requests(3, max_new_tokens=5, vocab_size=24, lengths=(1, 24))
    config = replace(
        make_config(pair, prune="catchup", batch_size=2),
        cache=CacheConfig(page_size=4, prefill_chunk=17),
        device=DEVICE.type,
        dtype="float32",
    )
    expected = generate(config, requests)
    outputs = generate(replace(config, attention=part("attention", "triton")), requests)
    Reference(pair[0]).assert_lossless(requests, outputs, expected)
    assert sum(len(tokens) for tokens in expected.values()) >= 12
