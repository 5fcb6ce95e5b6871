"""A set of kernels: which functions of the lab are replaced, and by which kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar, cast

Form = TypeVar("Form")


class Op(Enum):
    """The functions without weights that a kernel may replace.

    The torch form is in the module that uses it, and documents what it computes.
    """

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
        functions: the replacements of torch forms, with the same arguments and results.
    """

    functions: Mapping[Op, Callable[..., Any]] = field(default_factory=dict)

    def get(self, op: Op, torch_form: Form) -> Form:
        """Return the kernel that replaces `torch_form`, or `torch_form` if there is none."""
        return cast(Form, self.functions.get(op, torch_form))


TORCH_FORMS = KernelSet()
"""The set that replaces nothing."""
