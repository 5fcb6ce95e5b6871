"""The set of kernels=triton. Triton is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from spec_kernels.confidence import count_offered, note_confidence
from spec_kernels.draft_step import carry_hidden
from spec_kernels.early import early_launches
from spec_kernels.gumbel import sample_draft
from spec_kernels.lookup import extend_and_look_up
from spec_kernels.mtp_window import slide_windows
from spec_kernels.product_tiles import INVARIANT_ROWS
from spec_kernels.rejection import rejection_sample
from spec_kernels.relaxed import draft_standing
from spec_kernels.rope_write import rope_write
from spec_kernels.stops import going_on
from spec_kernels.strict import strict_accept
from spec_kernels.synthetic import synthetic_accept
from spec_kernels.tree_draw import draw_tree
from spec_kernels.tree_grow import choose_branches, choose_rows
from spec_kernels.tree_path import move_path
from spec_kernels.tree_rank import rank_tokens
from spec_kernels.tree_walk import follow_tree, impose_path
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.operators.promises import triton_rows_are_invariant
from spec_lab.operators.prompt_rounding import PROMPTS_ALIKE
from spec_lab.operators.triton_delta import TritonDeltaSteps, TritonReplayedUpdates, TritonStateCheckpoints
from spec_lab.operators.triton_drafting import FusedDraftInput, TritonClusters
from spec_lab.operators.triton_experts import TritonExperts, triton_router
from spec_lab.operators.triton_layers import TritonParts
from spec_lab.operators.triton_linear import TritonNorm
from spec_lab.operators.triton_sandwich import TritonLogitCap

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
"""The replacements of the functions of a round."""
FUNCTIONS_OF_MODELS: Mapping[Op, Callable[..., Any]] = {
    Op.ROPE_WRITE: rope_write,
    Op.ROUTER: triton_router,
    Op.EXPERTS: TritonExperts,
    Op.DELTA_STEPS: TritonDeltaSteps,
    Op.STATE_CHECKPOINTS: TritonStateCheckpoints,
    Op.REPLAYED_UPDATES: TritonReplayedUpdates,
}


def triton_set(dtype: torch.dtype = torch.bfloat16, row_invariant: bool = True) -> KernelSet:
    """Make the set for models of `dtype`. In float32 parts are left to the library, since tensor cores would only have
    TF32."""
    functions = {**TRITON_FUNCTIONS, **FUNCTIONS_OF_MODELS}
    if dtype is torch.float32:
        return KernelSet(functions)
    make = TritonParts(row_invariant)
    parts: dict[Op, Callable[[Any], Any]] = {
        Op.EARLY_LAUNCHES: lambda plain: early_launches,
        Op.NORM: TritonNorm.of,
        Op.LINEAR: make.linear,
        Op.SHARED_EXPERT: make.shared_expert,
        Op.LAYER: make.layer,
        Op.SANDWICH: make.sandwich,
        Op.PER_LAYER_EMBEDDING: make.per_layer_embedding,
        Op.LOGIT_CAP: lambda plain: TritonLogitCap(plain.cap),
        Op.DRAFT_INPUT: FusedDraftInput,
        Op.LIKELIEST: make.likeliest,
        Op.LIKELIEST_IN_CLUSTERS: TritonClusters,
    }
    if not row_invariant:
        return KernelSet(functions, parts, invariant_rows=0)
    return KernelSet(functions, parts, INVARIANT_ROWS, triton_rows_are_invariant, prompt_rounding=PROMPTS_ALIKE)
