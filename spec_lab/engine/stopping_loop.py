"""The draft loop of a round: every step, or with `drafter.stop` as long as any request of the batch goes on.

Where a stop is launched from Python, the host asks the device before each step. In a graph each step is in an IF node,
inside that of the step before it, where the driver has such nodes; elsewhere all steps run, and drafts behind a stop
are never offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch

from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.protocols import Drafter, StageTimer, State
from spec_lab.core.types import DraftStep
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.parts import Parts

StepScope = Callable[[], AbstractContextManager[None]]
"""Opens what surrounds draft steps, once or more often: the stage that their reading of experts counts for, or none."""


class DraftLoop(Protocol):
    """Says which draft steps of a round run behind its first one.

    Attributes:
        decides_on_device: the host does not learn how many steps ran.
        looks_between: something is noted or asked between steps, so that they cannot be one call.
    """

    decides_on_device: bool
    looks_between: bool

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        """Yield the number of each step that runs, from 1 to at most `most` - 1. The step is run inside a `scope`,
        before the next one is asked for; whoever begins goes on to the end."""
        ...


def collect_drafts(
    drafter: Drafter[State],
    mover: MetadataMover,
    state: State,
    num_draft_tokens: int | None = None,
    steps: Iterable[int] | None = None,
) -> torch.Tensor:
    """Take draft 1 from `state`, and run a recurrent step for each further one: [batch, num_draft_tokens].

    Args:
        num_draft_tokens: as many as the drafter has where it is None.
        steps: the steps that run, which may be fewer; None is all of them.
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
    """A draft loop in which all steps run."""

    decides_on_device = False

    def __init__(self, looks_between: bool = False) -> None:
        self.looks_between = looks_between

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        with scope():
            yield from range(1, most)


class StepsWhileAsked:
    """A draft loop in which the host waits before each step for the device to say whether anyone wants it."""

    decides_on_device = False
    looks_between = True

    def __init__(self, num_going_on: torch.Tensor) -> None:
        """`num_going_on`: [1] requests of the batch that want a draft behind the newest; each step moves it."""
        self._num_going_on = num_going_on

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        with scope():
            for index in range(1, most):
                if not bool(self._num_going_on):
                    return
                yield index


class StepsInIfNodes:
    """A draft loop in which a replay skips a step behind the stops of all requests, and with it all others.

    Each step's node stands in that of the step before it, so that a round meets one more than it runs steps. What a
    step hands on only the next one reads, which is skipped with it; drafts go to tensors from before the loop. Each
    has a scope of its own, which ends inside the node: behind it, what the step made may not exist. No event may be
    recorded inside such a node: the steps count as one stretch.
    """

    decides_on_device = True
    looks_between = True

    def __init__(self, num_going_on: torch.Tensor, recorder: GraphRecorder) -> None:
        self._num_going_on = num_going_on
        self._recorder = recorder

    def steps(self, timer: StageTimer, most: int, scope: StepScope) -> Iterator[int]:
        with ExitStack() as nodes:
            for index in range(1, most):
                nodes.enter_context(self._recorder.when_any(self._num_going_on, 0))
                with timer.unmarked(), scope():
                    yield index


def make_draft_loop(parts: Parts, num_going_on: torch.Tensor | None, recorder: GraphRecorder | None) -> DraftLoop:
    """Choose the loop of a round that `recorder` captures, or that is launched from Python where it is None.

    `num_going_on` is None where no request stops.
    """
    # A module for each draft catches up as it drafts, so none of them may sit a round out.
    if parts.drafter.requirements.distinct_steps or num_going_on is None:
        return EveryStep(looks_between=True)
    if recorder is None:
        return StepsWhileAsked(num_going_on)
    return StepsInIfNodes(num_going_on, recorder) if recorder.skips else EveryStep(looks_between=True)
