"""A set of kernels: which functions and parts of the lab are replaced, and by which kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar, cast

import torch

from spec_lab.core.prompts import NO_ROUNDING, PromptRounding

Form = TypeVar("Form")
ChoicesSeen = Callable[[torch.Tensor], None]


class Op(Enum):
    """What a kernel may replace: functions, classes, and parts of models with their weights.

    The torch form is in the module that uses it, and documents what it computes. That of a fused part is the
    composition of its parts.
    """

    ATTENTION = auto()
    ROPE_WRITE = auto()
    ROUTER = auto()
    EXPERTS = auto()
    DELTA_STEPS = auto()
    STATE_CHECKPOINTS = auto()
    REPLAYED_UPDATES = auto()
    EARLY_LAUNCHES = auto()
    NORM = auto()
    LINEAR = auto()
    SHARED_EXPERT = auto()
    LAYER = auto()
    STACK = auto()
    SANDWICH = auto()
    PER_LAYER_EMBEDDING = auto()
    LOGIT_CAP = auto()
    DRAFT_INPUT = auto()
    HEAD_LAYER = auto()
    LIKELIEST = auto()
    LIKELIEST_IN_CLUSTERS = auto()
    CHAIN_AT_ONCE = auto()
    STRICT_ACCEPT = auto()
    REJECTION_SAMPLE = auto()
    SYNTHETIC_ACCEPT = auto()
    DRAFT_STANDING = auto()
    FOLLOW_TREE = auto()
    DRAW_TREE = auto()
    IMPOSE_PATH = auto()
    SAMPLE_DRAFT = auto()
    NOTE_CONFIDENCE = auto()
    COUNT_OFFERED = auto()
    CATCHUP_PLACES = auto()
    COMMIT_ROWS = auto()
    CARRY_HIDDEN = auto()
    MTP_WINDOW = auto()
    GOING_ON = auto()
    LOOK_UP = auto()
    MOVE_PATH = auto()
    CHOOSE_BRANCHES = auto()
    CHOOSE_ROWS = auto()
    RANK_TOKENS = auto()


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels of a run. Objects look up the kernels they need here when they are made.

    Attributes:
        functions: the replacements of functions and classes, with the same arguments and results.
        parts: makes the replacement of a part with weights from its torch form, or returns that.
        invariant_rows: the most rows of a forward in which a row's bits may be independent of the others.
        is_row_invariant: whether in layers of a plan, for up to `invariant_rows` rows, they are.
        watch_experts: called for each layer with experts, with their number and the bytes of one. It returns what is
            shown the layer's choices [rows, top_k] before the experts run.
        prompt_rounding: if not `NO_ROUNDING`, makes a prompt's row get the same bits whatever rows share its forward,
            in layers for which `is_row_invariant` holds.
    """

    functions: Mapping[Op, Callable[..., Any]] = field(default_factory=dict)
    parts: Mapping[Op, Callable[[Any], Any]] = field(default_factory=dict)
    invariant_rows: int = 1
    is_row_invariant: Callable[[Any], bool] = lambda plan: False
    prompt_rounding: PromptRounding = NO_ROUNDING
    watch_experts: Callable[[int, int], ChoicesSeen] = lambda num_experts, expert_bytes: lambda expert_ids: None

    def get(self, op: Op, torch_form: Form) -> Form:
        """Return the kernel that replaces `torch_form`, or `torch_form` if there is none."""
        if op in self.parts:
            return cast(Form, self.parts[op](torch_form))
        return cast(Form, self.functions.get(op, torch_form))

    def without_parts(self) -> KernelSet:
        """Return the set whose parts with weights are those of torch."""
        return KernelSet(self.functions, watch_experts=self.watch_experts)


TORCH_FORMS = KernelSet()
"""The set that replaces nothing."""
