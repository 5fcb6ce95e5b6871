"""The rows that a layer keeps, and the two pruning knobs: which rows go on, and where."""

from __future__ import annotations

import pytest
import torch

from spec_lab.config.option import get, options
from spec_lab.core.kept import PrunePolicy
from spec_lab.core.pruning import LayerRows
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata
from tests.graph_lab import DEVICES


def metadata(num_requests: int, num_queries: int) -> AttentionMetadata:
    rows = torch.arange(num_requests * num_queries)
    return AttentionMetadata(rows, rows, torch.ones(num_requests), torch.ones(num_requests, 1), num_queries, 9)


LIVE = torch.tensor([0, 5, 11])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((40, 24), torch.bfloat16), ((40,), torch.int64), ((40, 3, 5), torch.float32)]
)
@pytest.mark.parametrize("count", [0, 1, 16, 33])
def test_rows_are_gathered_as_they_are(device: str, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    """Also twice the same one, and from a view with a stride."""
    table = (torch.randn(2 * shape[0], *shape[1:]) * 100).to(dtype)[::2].to(device)
    indices = (torch.arange(count) * 7 % 13).to(device)
    rows = rows_at(table, indices)
    assert rows.is_contiguous() and rows.shape == (count, *shape[1:])
    assert rows.cpu().tolist() == [table[index].cpu().tolist() for index in indices.tolist()]


def test_the_catchup_knob_names_a_place_and_its_rows_are_counted() -> None:
    """What is counted is what `Kept` lets through."""
    live, whole, rows = metadata(3, 1), metadata(3, 4), torch.arange(12).view(12, 1)
    counts = {"none": (12, 12, 12), "post_attention": (12, 3, 3), "pre_attention": (3, 3, 3)}
    assert options("prune.catchup").keys() == counts.keys()
    for name, option in options("prune.catchup").items():
        kept = PrunePolicy(get("prune.prefill", "last_row")().build(), option().drop).of_catchup(LIVE, live)
        queries = kept.queries(rows, whole)[0]
        computed = len(queries), len(kept.attended(queries)), len(kept.residual(rows))
        assert computed == LayerRows.of(kept.drop, 3, 12) == counts[name]
        assert kept.live(kept.residual(rows)).flatten().tolist() == LIVE.tolist()
