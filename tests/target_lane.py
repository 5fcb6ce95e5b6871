"""A target on transformers' files with a paged cache of its own, run in stretches of rows: what tests compare with
transformers' own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.caches import cache_row
from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.kept import ALL_ROWS, Drop, Kept
from spec_lab.core.kv_cache import NULL_PAGE, PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata, FeatureSpec, TargetOutput
from spec_lab.engine.pages import PageTable
from spec_lab.models.target_loader import WeightSource, load_target

PAGE_SIZE = 4
CPU = torch.device("cpu")


def made_once(folders: pytest.TempPathFactory, make: Callable[[Path, str], Any]) -> Callable[[str], tuple[Path, Any]]:
    """Return the folder of each kind, and what `make` gave for it when it was first asked for."""

    @cache
    def made(kind: str) -> tuple[Path, Any]:
        folder = folders.mktemp(kind)
        return folder, make(folder, kind)

    return made


def random_tokens(*shape: int, vocab_size: int = 160) -> torch.Tensor:
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(5))


@dataclass
class Lane:
    """A target with a cache for some requests, all NaN where nothing was written."""

    target: Any
    backend: TorchAttention
    cache: PagedKVCache
    table: PageTable

    def run(
        self,
        token_ids: torch.Tensor,
        starts: Sequence[int],
        features: FeatureSpec,
        kept: Kept | None = None,
        first_slot: int = 0,
    ) -> TargetOutput:
        """Run rows [batch, num_queries] at `starts`, of the slots from `first_slot` on."""
        attention = self.metadata(token_ids.shape[1], starts, first_slot)
        output: TargetOutput = self.target.forward(
            token_ids.flatten(), Pass(self.cache, attention, kept or ALL_ROWS), features
        )
        return output

    def metadata(self, num_queries: int, starts: Sequence[int], first_slot: int = 0) -> AttentionMetadata:
        first = torch.tensor(starts)
        positions = first.unsqueeze(1) + torch.arange(num_queries)
        pages = self.table.pages[first_slot : first_slot + len(starts)]
        return self.backend.build(positions, first + num_queries, pages, max(starts) + num_queries)

    def run_parts(
        self, token_ids: torch.Tensor, parts: Sequence[int], features: FeatureSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits and features of all rows of one text [1, length], run in stretches of so many rows."""
        logits, read, start = [], [], 0
        for count in parts:
            output = self.run(token_ids[:, start : start + count], [start], features)
            logits.append(self.target.logits(output.hidden))
            read.append(output.features)
            start += count
        assert start == token_ids.shape[1]
        return torch.cat(logits), None if read[0] is None else torch.cat(read)  # type: ignore[arg-type]

    def verify_ragged(self, token_ids: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
        """Return logits [requests, 4, vocab] of four rows of each request behind texts of these lengths, in one
        forward."""
        for request, length in enumerate(lens):
            self.run(token_ids[request : request + 1, :length], [0], FeatureSpec(), first_slot=request)
        rows = torch.stack([token_ids[request, length : length + 4] for request, length in enumerate(lens)])
        logits: torch.Tensor = self.target.logits(self.run(rows, lens, FeatureSpec()).hidden)
        return logits.view(len(lens), 4, -1)


def make_lane(folder: Path, length: int, num_requests: int = 1, dtype: torch.dtype = torch.float32) -> Lane:
    """Load a target with pages for `num_requests` texts of `length` tokens, dealt in turn and backwards."""
    config = read_model_config(folder)
    backend = TorchAttention(PAGE_SIZE, length)
    target = load_target(config, WeightSource(folder, dtype, CPU), backend, length)
    num_pages = 2 + -(-length // PAGE_SIZE) * num_requests
    table = PageTable(num_requests, length, PAGE_SIZE, CPU)
    for slot in range(num_requests):
        table.assign(slot, list(range(2 + slot, num_pages, num_requests))[::-1])
    kv = PagedKVCache([cache_row(plan) for plan in config.layers], num_pages, PAGE_SIZE, dtype, CPU)
    for tensor in kv.tensors:
        tensor[:, (NULL_PAGE + 1) * PAGE_SIZE :] = float("nan")
    return Lane(target, backend, kv, table)


@torch.inference_mode()
def assert_logits(folder: Path, model: Any, parts: Sequence[int], tolerance: float = 2e-5) -> None:
    """Check that the logits of one text, run in stretches of so many rows, are those of transformers' model."""
    token_ids = random_tokens(1, sum(parts))
    logits, _ = make_lane(folder, sum(parts)).run_parts(token_ids, parts, FeatureSpec())
    expected = model(token_ids).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@torch.inference_mode()
def assert_last_row_alone(lanes: Sequence[Lane], token_ids: torch.Tensor, taps: FeatureSpec) -> None:
    """Check that whatever goes on past the last layer's KV write, KV and features of all rows are bit-equal, and the
    last row's hidden state close: of all rows in the first lane, one in the second, none in the third."""
    count = token_ids.shape[1]
    live = Kept(Drop.BEFORE_ATTENTION, torch.tensor([count - 1]), lanes[1].metadata(1, [count - 1]))
    selections = None, live, Kept(Drop.EVERYTHING)
    outputs = [lane.run(token_ids, [0], taps, kept) for lane, kept in zip(lanes, selections, strict=True)]
    assert [len(output.hidden) for output in outputs] == [count, 1, 0]
    torch.testing.assert_close(outputs[1].hidden[0], outputs[0].hidden[-1], rtol=0, atol=3e-5)
    for lane, output in zip(lanes, outputs, strict=True):
        torch.testing.assert_close(output.features, outputs[0].features, rtol=0, atol=0)
        tensors = ([tensor.nan_to_num(7.0) for tensor in each.cache.tensors] for each in (lane, lanes[0]))
        torch.testing.assert_close(*tensors, rtol=0, atol=0)
