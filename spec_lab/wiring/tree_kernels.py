"""This module says what `kernels=` chooses of a round whose drafts are a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec_kernels.tree_reference import move_path_reference
from spec_lab.drafters.growth import TORCH_CHOICES, Choices
from spec_lab.drafters.siblings import LikeliestSiblings, SiblingPicker
from spec_lab.engine.drafts import MovePath


@dataclass(frozen=True, slots=True)
class TreeKernels:
    """The functions and classes of a tree's round.

    Attributes:
        move_path: makes a chain of the accepted path.
        choices: what chooses the branches and the rows of tree=dynamic.
        likeliest_siblings: makes what picks the likeliest tokens below a branch, from how many it picks.
    """

    move_path: MovePath
    choices: Choices
    likeliest_siblings: Callable[[int], SiblingPicker]


TORCH_TREES = TreeKernels(
    move_path=move_path_reference,
    choices=TORCH_CHOICES,
    likeliest_siblings=LikeliestSiblings,
)


def triton_trees() -> TreeKernels:
    """Make the same of Triton, which is imported here."""
    from spec_kernels.tree_grow import choose_branches, choose_rows
    from spec_kernels.tree_path import move_path
    from spec_lab.drafters.triton_siblings import TritonLikeliestSiblings

    return TreeKernels(
        move_path=move_path,
        choices=Choices(choose_branches, choose_rows),
        likeliest_siblings=TritonLikeliestSiblings,
    )
