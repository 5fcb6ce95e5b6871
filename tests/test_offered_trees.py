"""Trees of which a round verifies a part: by the drafter's confidence, by a budget of rows; eagerly and captured.

That the text is plain decoding's is a case of `lossless_cases.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_lab.acceptance.confidences import RowConfidences
from spec_lab.config.run import VerifyConfig
from spec_lab.core.draft_tree import DraftTree, keep_rows
from spec_lab.drafters.confident_trees import ConfidentDynamicTree
from spec_lab.drafters.growth import DynamicTree
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import Ranked
from spec_lab.engine.offered import RowOffers
from spec_lab.options.trees import DynamicTreeConfig
from tests.graph_lab import MODES, RULES, Lab, lab, mixed_requests

__all__ = ["lab"]

CPU = torch.device("cpu")
SCRATCH = 3
TREE = DynamicTreeConfig(topk=2, num_rows=6)
STOP = {"stop": "confidence", "stop_threshold": 0.15}


def grown_tree(threshold: float | None) -> tuple[DraftTree, RowConfidences]:
    """A tree of depth 2 and its notes, for slot 1: below the root 7 (.6) and 8 (.3); below each 7 a half, 8 a third."""
    confidences = RowConfidences(SCRATCH, 6, CPU, threshold)
    tree = ConfidentDynamicTree(DynamicTree(2, 6, 2), confidences)
    rows = DraftedRows(torch.tensor([1]), torch.tensor([5]))
    growth = tree.start(Ranked(torch.tensor([[[7, 8]]]), torch.tensor([[[0.6, 0.3]]]).log()), rows)
    tree.branch(growth, torch.zeros(1, 1, 4))
    tree.add(growth, Ranked(torch.tensor([[[7, 8], [7, 8]]]), torch.tensor([[[0.5, 0.3], [0.5, 0.3]]]).log()))
    return tree.finish(growth), confidences


def test_every_row_has_the_product_from_the_root() -> None:
    tree, confidences = grown_tree(None)
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 2]]
    torch.testing.assert_close(confidences.scores[1].exp(), torch.tensor([0.6, 0.3, 0.3, 0.18, 0.15]))


def test_nothing_is_drafted_below_a_branch_that_ends() -> None:
    """The branch of .3 ends, and is offered itself; a row without a draft is never offered."""
    _, confidences = grown_tree(0.4)
    assert confidences.scores[1].exp().sort().values.tolist() == pytest.approx([0, 0.18, 0.3, 0.3, 0.6])
    assert confidences.num_going_on.tolist() == [0]
    offers = RowOffers(confidences)
    assert offers.of(torch.tensor([1, SCRATCH]), torch.tensor([True, False])).sum(dim=1).tolist() == [4, 0]


@pytest.mark.parametrize(("budget", "num_rows"), [(1, 0), (2, 1), (4, 3), (9, 5)])
def test_a_budget_keeps_the_likeliest_rows_with_their_parents(budget: int, num_rows: int) -> None:
    """The root takes a row of it."""
    tree, confidences = grown_tree(None)
    is_offered = RowOffers(confidences, budget).of(torch.tensor([1]), torch.tensor([True]))[0]
    scores = confidences.scores[1]
    assert int(is_offered.sum()) == num_rows
    assert num_rows in (0, 5) or scores[is_offered].min() >= scores[~is_offered].max()
    kept = [0, *(is_offered.nonzero().flatten() + 1).tolist()]
    assert all(int(tree.parents[0, row]) in kept for row in kept)


def test_a_row_behind_those_kept_is_its_own_parent() -> None:
    """The first request keeps fewer drafts than the second: nothing can accept the row behind them."""
    tokens, parents = torch.tensor([[9, 4, 5, 6]] * 2), torch.tensor([[0, 0, 0, 1]] * 2)
    is_kept = torch.tensor([[True, False, True], [True, True, True]])
    kept = keep_rows(tokens, parents, is_kept, 3)
    assert kept[0][:, :3].tolist() == [[9, 4, 6], [9, 4, 5]]
    assert kept[1].tolist() == [[0, 0, 1, 3], [0, 0, 0, 1]]


KINDS: dict[str, dict[str, Any]] = {"stop": {"options": STOP}, "budget": {"verify": VerifyConfig(budget=9)}}


@pytest.mark.parametrize(
    ("kind", "mode", "drafter"), [("stop", "full_loop", "eagle3"), ("budget", "overlap", "frozen_kv")]
)
def test_a_graph_offers_what_eager_offers(lab: Lab, kind: str, mode: str, drafter: str) -> None:
    requests = [replace(request, ignore_eos=True) for request in mixed_requests(3, 8)]
    options = {"drafter": drafter, "batch_size": 3, "rule": RULES["strict"], "tree": TREE, **KINDS[kind]}
    captured = lab.engine(requests, MODES[mode], **options).generate(requests)
    eager = lab.engine(requests, None, **options).generate(requests)
    assert [(r.output_ids, r.offered_per_round) for r in captured.requests] == [
        (r.output_ids, r.offered_per_round) for r in eager.requests
    ]
    full = (TREE.num_rows - 1) * 3
    rows = [record.rows for record in eager.rounds if len(record.request_ids) == 3]
    assert any(row.offered < full for row in rows), "else nothing is tried"
    if kind == "budget":
        assert all(row.offered <= 9 - 3 and row.verified <= 3 * 7 for row in rows)
