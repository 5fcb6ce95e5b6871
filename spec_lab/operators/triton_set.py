"""The Triton functions with which `kernels=triton` replaces torch forms. Triton is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spec_kernels.confidence import count_offered, note_confidence
from spec_kernels.draft_step import carry_hidden
from spec_kernels.gumbel import sample_draft
from spec_kernels.lookup import extend_and_look_up
from spec_kernels.mtp_window import slide_windows
from spec_kernels.rejection import rejection_sample
from spec_kernels.relaxed import draft_standing
from spec_kernels.stops import going_on
from spec_kernels.strict import strict_accept
from spec_kernels.synthetic import synthetic_accept
from spec_kernels.tree_draw import draw_tree
from spec_kernels.tree_grow import choose_branches, choose_rows
from spec_kernels.tree_path import move_path
from spec_kernels.tree_rank import rank_tokens
from spec_kernels.tree_walk import follow_tree, impose_path
from spec_lab.operators.kernel_set import Op

TRITON_FUNCTIONS: Mapping[Op, Callable[..., Any]] = {
    Op.STRICT_ACCEPT: strict_accept,
    Op.REJECTION_SAMPLE: rejection_sample,
    Op.SYNTHETIC_ACCEPT: synthetic_accept,
    Op.DRAFT_STANDING: draft_standing,
    Op.FOLLOW_TREE: follow_tree,
    Op.DRAW_TREE: draw_tree,
    Op.IMPOSE_PATH: impose_path,
    Op.SAMPLE_DRAFT: sample_draft,
    Op.NOTE_CONFIDENCE: note_confidence,
    Op.COUNT_OFFERED: count_offered,
    Op.CARRY_HIDDEN: carry_hidden,
    Op.MTP_WINDOW: slide_windows,
    Op.GOING_ON: going_on,
    Op.LOOK_UP: extend_and_look_up,
    Op.MOVE_PATH: move_path,
    Op.CHOOSE_BRANCHES: choose_branches,
    Op.CHOOSE_ROWS: choose_rows,
    Op.RANK_TOKENS: rank_tokens,
}
