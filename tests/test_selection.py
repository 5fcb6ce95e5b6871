"""Row selections and the two pruning knobs: which rows go on, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_lab.config.option import get, options
from spec_lab.core.prompts import LiveRows
from spec_lab.core.rows import rows_at
from spec_lab.core.selection import AfterAttention, AllRows, BeforeAttention, NoRows
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
    whole, selection = metadata(3, 4), AllRows(LIVE)
    assert selection.queries(rows, whole) == (rows, whole)
    assert selection.attended(rows) is rows and selection.residual(rows) is rows
    assert selection.live(rows).flatten().tolist() == [0, 5, 11]
    assert AllRows().live(rows) is rows and not selection.is_empty


def test_after_attention_every_row_attends_and_the_live_ones_meet_their_residual(rows: torch.Tensor) -> None:
    whole, selection = metadata(3, 4), AfterAttention(LIVE)
    assert selection.queries(rows, whole) == (rows, whole)
    assert selection.attended(rows).flatten().tolist() == selection.residual(rows).flatten().tolist() == [0, 5, 11]
    assert selection.live(rows[:3]) is not None and len(selection.live(rows[:3])) == 3
    assert not selection.is_empty


def test_before_attention_the_live_rows_alone_attend_with_metadata_of_one_query(rows: torch.Tensor) -> None:
    live = metadata(3, 1)
    selection = BeforeAttention(LIVE, live)
    queries, attention = selection.queries(rows, metadata(3, 4))
    assert queries.flatten().tolist() == [0, 5, 11] and attention is live
    assert selection.residual(rows).flatten().tolist() == [0, 5, 11]
    assert selection.attended(queries) is queries and selection.live(queries) is queries
    assert not selection.is_empty


LAST = LiveRows(torch.tensor([11]), metadata(1, 1))


def test_no_rows_writes_kv_only() -> None:
    assert NoRows().is_empty


def test_catchup_knob_names_its_selection_and_counts_its_rows() -> None:
    live = metadata(3, 1)
    kinds: dict[str, Any] = {"none": AllRows, "post_attention": AfterAttention, "pre_attention": BeforeAttention}
    counts = {"none": (12, 12, 12), "post_attention": (12, 3, 3), "pre_attention": (3, 3, 3)}
    assert options("prune.catchup").keys() == kinds.keys()
    for name, option in options("prune.catchup").items():
        policy = option().build()
        selection: Any = policy.selection(LIVE, live)
        assert type(selection) is kinds[name]
        assert torch.equal(selection.live_rows, LIVE)
        assert policy.num_computed([7, 8, 9], 4) == counts[name]


@pytest.mark.parametrize("features", [NO_FEATURES, TAPS, FINAL])
def test_all_prompt_rows_go_on_and_have_logits(features: FeatureSpec, rows: torch.Tensor) -> None:
    policy = get("prune.prefill", "all_rows")().build()
    for live in (None, LAST):
        assert policy.target_selection(live, features) == AllRows()
        assert policy.logit_rows(rows, live) is rows
        assert not policy.drafter_selection(live).is_empty
    last = policy.drafter_selection(LAST)
    assert last.live(rows).flatten().tolist() == [11]


@pytest.mark.parametrize("features", [NO_FEATURES, TAPS])
def test_the_last_prompt_row_alone_goes_on_where_nobody_reads_the_others(
    features: FeatureSpec, rows: torch.Tensor
) -> None:
    policy = get("prune.prefill", "last_row")().build()
    for selection in (policy.target_selection(LAST, features), policy.drafter_selection(LAST)):
        assert selection.residual(rows).flatten().tolist() == [11]
        assert selection.queries(rows, metadata(1, 12))[1] is LAST.attention
    assert policy.target_selection(None, features).is_empty
    assert policy.drafter_selection(None).is_empty


def test_the_targets_last_layer_keeps_every_row_when_the_drafter_reads_the_final_hidden(rows: torch.Tensor) -> None:
    policy = get("prune.prefill", "last_row")().build()
    for live in (None, LAST):
        selection = policy.target_selection(live, FINAL)
        assert selection.residual(rows) is rows and not selection.is_empty


def test_logits_for_one_row_a_request_and_none_in_the_middle_of_a_prompt(rows: torch.Tensor) -> None:
    policy = get("prune.prefill", "last_row")().build()
    assert policy.logit_rows(rows, LAST).flatten().tolist() == [11]
    assert policy.logit_rows(rows[11:], LAST).flatten().tolist() == [11], "the target may have dropped the others"
    assert len(policy.logit_rows(rows, None)) == 0
