"""The draft loop of a round: every step, or with `drafter.stop` as long as any request of the batch goes on.

Where a stop is launched from Python, the host asks the device before each step. In a graph each step is in an IF node,
inside that of the step before it, where the driver has such nodes; elsewhere all steps run, and drafts behind a stop
are never offered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.protocols import Drafter, State
from spec_lab.core.types import DraftStep
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.parts import Parts

StepScope = Callable[[], AbstractContextManager[None]]
"""Opens what surrounds draft steps, once or more often: the stage that their reading of experts counts for, or none."""


class DraftLoop(Protocol):
    """Runs the draft steps of a round behind its first one.

    Attributes:
        decides_on_device: the host does not learn from `run` how many steps ran; `DraftOffers.num_drafted` says it.
    """

    decides_on_device: bool

    def run(self, parts: Parts, mover: MetadataMover, state: Any, most: int, scope: StepScope) -> torch.Tensor:
        """Return drafts [batch, at most `most`] from the `state` that the first step left, with steps in a `scope`."""
        ...


def collect_drafts(
    drafter: Drafter[State],
    mover: MetadataMover,
    state: State,
    num_draft_tokens: int | None = None,
    is_over: Callable[[], bool] | None = None,
) -> torch.Tensor:
    """Take draft 1 from `state`, and run a recurrent step for each further one: [batch, num_draft_tokens].

    Args:
        num_draft_tokens: as many as the drafter has where it is None.
        is_over: tells whether no draft is wanted behind the one just made; None where all are.
    """
    if num_draft_tokens is None:
        num_draft_tokens = drafter.num_draft_tokens
    drafts = state.tokens.new_zeros((state.tokens.shape[0], num_draft_tokens))
    columns = torch.arange(num_draft_tokens, device=drafts.device)
    for index in range(num_draft_tokens):
        if index > 0:
            if is_over is not None and is_over():
                return drafts[:, :index]
            if state.attention is not None:
                mover.advance(state.attention)
            drafter.step(state, DraftStep(index, columns[index : index + 1]))
        drafts[:, index] = state.tokens
    return drafts


class StepsAtOnce:
    """Keeps the protocol `DraftLoop`: all steps run, in one call where the drafter can and metadata is not stale."""

    decides_on_device = False

    def run(self, parts: Parts, mover: MetadataMover, state: Any, most: int, scope: StepScope) -> torch.Tensor:
        rest = parts.drafter.requirements.draft_rest
        with scope():
            if rest is not None and mover is parts.backend:
                return rest(state)
            return collect_drafts(parts.drafter, mover, state, most)


class EveryStep:
    """Keeps the protocol `DraftLoop`: all steps run, one by one, so that each may note how sure it is."""

    decides_on_device = False

    def run(self, parts: Parts, mover: MetadataMover, state: Any, most: int, scope: StepScope) -> torch.Tensor:
        with scope():
            return collect_drafts(parts.drafter, mover, state, most)


class StepsWhileAsked:
    """Keeps the protocol `DraftLoop`: the host waits before each step for the device to say whether anyone wants it."""

    decides_on_device = False

    def __init__(self, offers: DraftOffers) -> None:
        self._offers = offers

    def run(self, parts: Parts, mover: MetadataMover, state: Any, most: int, scope: StepScope) -> torch.Tensor:
        def is_over() -> bool:
            return not bool(self._offers.num_going_on)

        with scope():
            return collect_drafts(parts.drafter, mover, state, most, is_over)


class StepsInIfNodes:
    """Keeps the protocol `DraftLoop`: a replay skips a step behind the stops of all requests, and with it all others.

    Each step's node stands in that of the step before it, so that a round meets one more than it runs steps. What a
    step hands on only the next one reads, which is skipped with it; drafts go to a tensor from before the loop. Each
    has a scope of its own, which ends inside the node: behind it, what the step made may not exist. No event may be
    recorded inside such a node: the steps count as one stretch.
    """

    decides_on_device = True

    def __init__(self, offers: DraftOffers, recorder: GraphRecorder) -> None:
        self._offers = offers
        self._recorder = recorder

    def run(self, parts: Parts, mover: MetadataMover, state: Any, most: int, scope: StepScope) -> torch.Tensor:
        drafts = state.tokens.new_zeros((state.tokens.shape[0], most))
        columns = torch.arange(most, device=drafts.device)
        drafts[:, :1] = state.tokens.unsqueeze(1)
        with ExitStack() as nodes:
            for index in range(1, most):
                nodes.enter_context(self._recorder.when_any(self._offers.num_going_on, 0))
                with parts.timer.unmarked(), scope():
                    if state.attention is not None:
                        mover.advance(state.attention)
                    parts.drafter.step(state, DraftStep(index, columns[index : index + 1]))
                    drafts[:, index] = state.tokens
        return drafts


def make_draft_loop(parts: Parts, offers: DraftOffers, recorder: GraphRecorder | None) -> DraftLoop:
    """Choose the loop of a round that `recorder` captures, or that is launched from Python where it is None."""
    # A module for each draft catches up as it drafts, so none of them may sit a round out.
    if parts.drafter.requirements.distinct_steps or not offers.may_stop:
        return EveryStep()
    if recorder is None:
        return StepsWhileAsked(offers)
    return StepsInIfNodes(offers, recorder) if recorder.skips else EveryStep()
