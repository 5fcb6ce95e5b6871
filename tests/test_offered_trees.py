"""Trees of which a round verifies a part: the likeliest rows."""

from __future__ import annotations

import pytest
import torch

from spec_lab.acceptance.confidences import RowConfidences
from spec_lab.core.draft_tree import DraftTree, keep_rows
from spec_lab.drafters.confident_trees import ConfidentDynamicTree
from spec_lab.drafters.growth import DynamicTree
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import Ranked
from spec_lab.engine.offered import RowOffers
from tests.graph_lab import lab

__all__ = ["lab"]

CPU = torch.device("cpu")
SCRATCH = 3


def grown_tree() -> tuple[DraftTree, RowConfidences]:
    """A tree of depth 2 and its notes, for slot 1: below the root 7 (.6) and 8 (.3); below each 7 a half, 8 a third."""
    confidences = RowConfidences(SCRATCH, 6, CPU)
    tree = ConfidentDynamicTree(DynamicTree(2, 6, 2), confidences)
    rows = DraftedRows(torch.tensor([1]), torch.tensor([5]))
    growth = tree.start(Ranked(torch.tensor([[[7, 8]]]), torch.tensor([[[0.6, 0.3]]]).log()), rows)
    tree.branch(growth, torch.zeros(1, 1, 4))
    tree.add(growth, Ranked(torch.tensor([[[7, 8], [7, 8]]]), torch.tensor([[[0.5, 0.3], [0.5, 0.3]]]).log()))
    return tree.finish(growth), confidences


def test_every_row_has_the_product_from_the_root() -> None:
    tree, confidences = grown_tree()
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 2]]
    torch.testing.assert_close(confidences.scores[1].exp(), torch.tensor([0.6, 0.3, 0.3, 0.18, 0.15]))


@pytest.mark.parametrize("num_rows", [0, 1, 3, 5])
def test_the_likeliest_rows_are_offered_with_their_parents(num_rows: int) -> None:
    tree, confidences = grown_tree()
    slots, active = torch.tensor([1, SCRATCH]), torch.tensor([True, False])
    is_offered, of_scratch = RowOffers(confidences).of(slots, active, num_rows)
    scores = confidences.scores[1]
    assert int(is_offered.sum()) == num_rows and not of_scratch.any()
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
