"""The draft loop of a round: all steps, or with `drafter.stop` only while any request of the batch goes on.

In eager mode the host asks the device before each step. In a graph all steps run, and drafts after a stop are never
offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.protocols import Drafter, StageTimer, State
from spec_lab.core.types import DraftStep
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.parts import Parts

StepScope = Callable[[], AbstractContextManager[None]]
"""Opens a context around draft steps; a round may open several. Inside, `ExpertsRead` counts experts for a stage, or
nothing."""


class DraftLoop(Protocol):
    """Decides which draft steps of a round run after its first one.

    Attributes:
        looks_between: the steps run one by one, so that they cannot be one call of the drafter (`draft_rest`).
    """

    looks_between: bool

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        """Yield the number of each step that runs, from 1 to at most `most` - 1.

        The iterator holds a `scope` open while the caller runs a step. The caller must exhaust the iterator.
        """
        ...


def collect_drafts(
    drafter: Drafter[State],
    mover: MetadataMover,
    state: State,
    num_draft_tokens: int | None = None,
    steps: Iterable[int] | None = None,
) -> torch.Tensor:
    """Take draft 1 from `state`, and run a recurrent step for each further draft; return the drafts [batch, made].

    Args:
        num_draft_tokens: the most drafts; None for the drafter's own number.
        steps: the steps that run, possibly fewer; None for all.
    """
    if num_draft_tokens is None:
        num_draft_tokens = drafter.num_draft_tokens
    drafts = state.tokens.new_zeros((state.tokens.shape[0], num_draft_tokens))
    columns = torch.arange(num_draft_tokens, device=drafts.device)
    num_made = min(1, num_draft_tokens)
    if num_made:
        drafts[:, 0] = state.tokens
    for index in range(1, num_draft_tokens) if steps is None else steps:
        if state.attention is not None:
            mover.advance(state.attention)
        drafter.step(state, DraftStep(index, columns[index : index + 1]))
        drafts[:, index] = state.tokens
        num_made = index + 1
    return drafts if num_made == num_draft_tokens else drafts[:, :num_made]


class EveryStep:
    """All steps run."""

    def __init__(self, looks_between: bool = False) -> None:
        self.looks_between = looks_between

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        with scope():
            yield from range(1, most)


class StepsWhileAsked:
    """Before each step the host waits for the device to say whether any request wants another draft."""

    looks_between = True

    def __init__(self, num_going_on: torch.Tensor) -> None:
        """`num_going_on`: [1] requests of the batch that want another draft; each step updates it."""
        self._num_going_on = num_going_on

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        with scope():
            for index in range(1, most):
                if not bool(self._num_going_on):
                    return
                yield index


def make_draft_loop(parts: Parts, num_going_on: torch.Tensor | None, recorder: GraphRecorder | None) -> DraftLoop:
    """Choose the draft loop of a round. `recorder` captures the round; None if it is launched eagerly.

    `num_going_on` is None if no request stops early.
    """
    # If each draft has a module of its own, the modules catch up while they draft. So all must run in every round.
    if parts.drafter.requirements.distinct_steps or num_going_on is None:
        return EveryStep(looks_between=True)
    if recorder is None:
        return StepsWhileAsked(num_going_on)
    return EveryStep(looks_between=True)
