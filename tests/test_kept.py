"""The rows that a layer keeps, and the two pruning knobs: which rows go on, and where."""

from __future__ import annotations

import pytest
import torch

from spec_lab.config.option import get, options
from spec_lab.core.kept import Kept, PrunePolicy
from spec_lab.core.prompts import LiveRows
from spec_lab.core.pruning import Drop, LayerRows
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, FeatureSpec, NormSide
from tests.graph_lab import DEVICES

NO_FEATURES, TAPS, FINAL = FeatureSpec(), FeatureSpec(layer_inputs=(2, 4)), FeatureSpec(final_hidden=NormSide.POST_NORM)


def metadata(num_requests: int, num_queries: int) -> AttentionMetadata:
    rows = torch.arange(num_requests * num_queries)
    return AttentionMetadata(rows, rows, torch.ones(num_requests), torch.ones(num_requests, 1), num_queries, 9)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.arange(12).view(12, 1)


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


def test_all_rows_go_on_and_the_live_ones_are_picked_from_the_output(rows: torch.Tensor) -> None:
    whole, kept = metadata(3, 4), Kept(Drop.AFTER_LAYER, LIVE)
    assert kept.queries(rows, whole) == (rows, whole)
    assert kept.attended(rows) is rows and kept.residual(rows) is rows
    assert kept.live(rows).flatten().tolist() == [0, 5, 11]
    assert Kept().live(rows) is rows and not kept.is_empty


def test_after_attention_every_row_attends_and_the_live_ones_meet_their_residual(rows: torch.Tensor) -> None:
    whole, kept = metadata(3, 4), Kept(Drop.AFTER_ATTENTION, LIVE, metadata(3, 1))
    assert kept.queries(rows, whole) == (rows, whole)
    assert kept.attended(rows).flatten().tolist() == kept.residual(rows).flatten().tolist() == [0, 5, 11]
    assert kept.live(rows[:3]) is not None and len(kept.live(rows[:3])) == 3
    assert not kept.is_empty


def test_before_attention_the_live_rows_alone_attend_with_metadata_of_one_query(rows: torch.Tensor) -> None:
    live = metadata(3, 1)
    kept = Kept(Drop.BEFORE_ATTENTION, LIVE, live)
    queries, attention = kept.queries(rows, metadata(3, 4))
    assert queries.flatten().tolist() == [0, 5, 11] and attention is live
    assert kept.residual(rows).flatten().tolist() == [0, 5, 11]
    assert kept.attended(queries) is queries and kept.live(queries) is queries
    assert not kept.is_empty


LAST = LiveRows(torch.tensor([11]), metadata(1, 1))


def test_no_rows_writes_kv_only() -> None:
    assert Kept(Drop.EVERYTHING).is_empty


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


@pytest.mark.parametrize("features", [NO_FEATURES, TAPS, FINAL])
def test_all_prompt_rows_go_on_and_have_logits(features: FeatureSpec, rows: torch.Tensor) -> None:
    policy = get("prune.prefill", "all_rows")().build()
    for live in (None, LAST):
        assert policy.in_target(live, features) == Kept()
        assert policy.logit_rows(rows, live) is rows
        assert not policy.in_drafter(live).is_empty
    last = policy.in_drafter(LAST)
    assert last.live(rows).flatten().tolist() == [11]


@pytest.mark.parametrize("features", [NO_FEATURES, TAPS])
def test_the_last_prompt_row_alone_goes_on_where_nobody_reads_the_others(
    features: FeatureSpec, rows: torch.Tensor
) -> None:
    policy = get("prune.prefill", "last_row")().build()
    for kept in (policy.in_target(LAST, features), policy.in_drafter(LAST)):
        assert kept.residual(rows).flatten().tolist() == [11]
        assert kept.queries(rows, metadata(1, 12))[1] is LAST.attention
    assert policy.in_target(None, features).is_empty
    assert policy.in_drafter(None).is_empty


def test_the_targets_last_layer_keeps_every_row_when_the_drafter_reads_the_final_hidden(rows: torch.Tensor) -> None:
    policy = get("prune.prefill", "last_row")().build()
    for live in (None, LAST):
        kept = policy.in_target(live, FINAL)
        assert kept.residual(rows) is rows and not kept.is_empty


def test_logits_for_one_row_a_request_and_none_in_the_middle_of_a_prompt(rows: torch.Tensor) -> None:
    policy = get("prune.prefill", "last_row")().build()
    assert policy.logit_rows(rows, LAST).flatten().tolist() == [11]
    assert policy.logit_rows(rows[11:], LAST).flatten().tolist() == [11], "the target may have dropped the others"
    assert len(policy.logit_rows(rows, None)) == 0
