"""The protocols of a round's parts: target, drafter, acceptance rule and timer.

Implementations are in `spec_lab.models`, `spec_lab.drafters`, `spec_lab.acceptance` and `spec_lab.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from spec_lab.core.passes import Pass
from spec_lab.core.prompts import PromptPack
from spec_lab.core.types import (
    AcceptanceInputs,
    AttentionKind,
    AttentionMetadata,
    DraftStep,
    FeatureSpec,
    Request,
    TargetOutput,
    Verification,
    VerifiedRound,
)
from spec_lab.core.types import Sequence as RunningRequest


class Target(Protocol):
    """The model that verifies the drafts."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]

    def forward(self, token_ids: torch.Tensor, at: Pass, features: FeatureSpec) -> TargetOutput:
        """Run tokens [rows] and write their KV. After the last KV write only the selected rows go on.

        If the drafter taps a layer after that write, all rows go on to the last layer. Features have all rows; with
        `final_hidden` they have the selected rows.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden states after the final norm [rows, hidden_size] into logits [rows, vocab_size]."""
        ...


class HostDrafter(Protocol):
    """Drafts on the host, after it has read a round and before it launches the next.

    Attributes:
        num_on_device: drafts that the device makes for each request; 0 if all come from the host. In a round without
            drafts of the host, verify needs rows for these drafts only.
        part_names: names, for the record, of the drafters on the host and on the device; None if there is only one.
    """

    num_on_device: int
    part_names: tuple[str, str] | None

    def restart(self) -> None:
        """Drop all state, so that a pass over a workload does not depend on earlier passes."""
        ...

    def admit(self, slot: int, request: Request) -> None:
        """Begin with a request that takes `slot`."""
        ...

    def draft(self, sequences: Sequence[RunningRequest]) -> list[list[int] | None]:
        """Return up to K drafts to follow the pending token of each request; None keeps the device's drafts."""
        ...

    def finish(self, sequence: RunningRequest) -> None:
        """Handle the end of a request, which gives up its slot."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterRequirements:
    """The requirements of a drafter on the other parts.

    Attributes:
        features: the target's hidden states that it reads.
        catchup_rows: the rows for each request in each pass of the catch-up step: (N,) for one reused layer,
            (N, N + 1, ...) for a module for each draft, (2K,) for P-EAGLE, () without a catch-up step.
        distinct_steps: the steps of a round differ in more than the column that they write, for instance in weights.
            So each needs a graph of its own.
        learns_continuations: its method `learn` takes the outputs of plain decoding by request id, before anything is
            timed.
        drafts_rest: its method `draft_rest` makes a number of drafts [batch, drafts] at once from the state with draft
            1, and itself advances metadata, if there is any. Else the round runs `step` for each draft.
        has_loop: whether drafts are made one after another; False if all are ready with the first.
        on_host: the drafter that runs on the host, alone or in addition; None if there is none.
        counts_catchup: its method `count_catchup` counts the rows that a catch-up step computes, from the number of
            requests, of their live rows and of the verified rows of each. Else the pruning counts them.
        step_kinds: the kinds of attention in a draft step, for which graph=step_replay builds metadata; empty if it is
            built once.
        prunes_catchup: whether `prune.catchup` changes the catch-up step, if there is one.
    """

    features: FeatureSpec = field(default_factory=FeatureSpec)
    catchup_rows: tuple[int, ...] = ()
    distinct_steps: bool = False
    learns_continuations: bool = False
    drafts_rest: bool = False
    has_loop: bool = True
    on_host: HostDrafter | None = None
    counts_catchup: bool = False
    step_kinds: tuple[AttentionKind, ...] = ()
    prunes_catchup: bool = True

    @property
    def catches_up(self) -> bool:
        """Return whether there is a catch-up step that `prune.catchup` can prune."""
        return bool(self.catchup_rows) and self.prunes_catchup

    def rows_of_passes(self, num_verified: int) -> tuple[int, ...]:
        """Return the rows for each request, without mask rows, in each pass after a round that verified `num_verified`
        rows.

        A reused layer runs the verified rows; a module for each draft always runs its own window.
        """
        return self.catchup_rows if self.distinct_steps else (num_verified,) * len(self.catchup_rows)


class DraftState(Protocol):
    """The state of drafting between the steps of one round.

    Attributes:
        tokens: [batch] the newest draft, in target ids.
        attention: one-row metadata, advanced in place by one position before each step; None if nothing is advanced.
    """

    tokens: torch.Tensor
    attention: AttentionMetadata | None


State = TypeVar("State", bound=DraftState)


class Drafter(Protocol[State]):
    """Proposes at most `num_draft_tokens` tokens a round: `catch_up` gives the first, each `step` one more."""

    num_draft_tokens: int
    requirements: DrafterRequirements

    def admit(self, slot: int, request: Request) -> None:
        """Reset the state of `slot` for a new request."""
        ...

    def ingest(self, pack: PromptPack) -> State | None:
        """Ingest chunks of prompts. Return the state with draft 1 of the prompts that end; None if none ends."""
        ...

    def catch_up(self, verified: VerifiedRound) -> State:
        """Process a verified round, which may have verified fewer than K drafts, and return the state with draft 1.

        A drafter with a KV cache catches up with the emitted tokens. A drafter without one only takes its first draft
        step, if it has any.
        """
        ...

    def step(self, state: State, step: DraftStep) -> None:
        """Replace `state.tokens` by the next draft. `state.attention` has already been advanced."""
        ...

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [batch, K, vocab], in a tree [batch, branches, vocab], from which the drafts of `slot_ids`
        were sampled; None if they were not sampled."""
        ...


@dataclass(frozen=True, slots=True)
class RuleTraits:
    """The properties of a rule that a run has to know.

    Attributes:
        lossless: the output follows the target's distribution (at temperature 0, its argmax).
        imposed: acceptance is imposed, so acceptance lengths and answers say nothing about the models.
        reads_draft_logits: the drafter must sample, and keep the logits that it sampled from.
    """

    lossless: bool
    imposed: bool = False
    reads_draft_logits: bool = False


class AcceptanceRule(Protocol):
    """Turns logits and drafts into emitted tokens, without a model. Its state, if any, is in tensors with an entry for
    each slot."""

    traits: RuleTraits

    def admit(self, slot: int, request: Request) -> None:
        """Set the slot's state for a new request."""
        ...

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        """Choose the token [batch] after each prompt of `kv_lens` [batch] tokens, from logits [batch, vocab]."""
        ...

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        """Judge one round. It uses device tensors only."""
        ...


class StageTimer(Protocol):
    """Measures named spans inside a round."""

    def round(self, num_rounds: int = 1) -> AbstractContextManager[None]:
        """Begin a launch of `num_rounds` rounds, and drop the spans of the previous launch."""
        ...

    def inner_round(self, index: int) -> AbstractContextManager[None]:
        """Assign the spans inside to round `index`, while several rounds are captured in one graph."""
        ...

    def unmarked(self) -> AbstractContextManager[None]:
        """Measure no spans inside: in a part of a graph that may not contain events, and in a prompt pass."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]: ...

    def reading(self) -> AbstractContextManager[None]:
        """Enclose the wait for a round's results. It counts as `readback` if the host's clock measures spans."""
        ...

    def capture(self) -> AbstractContextManager[list[Any]]:
        """Enclose the capture of a graph. Spans become marks inside the graph, if the device supports that."""
        ...

    def replay(self, name: str, marks: list[Any]) -> AbstractContextManager[None]:
        """Enclose a replay of segment `name`. The segment's time is that of `marks`, or of one span around the
        replay."""
        ...

    @property
    def spans(self) -> Any:
        """Return the container of the latest launch's spans, for a `collect` that comes after the next launch."""
        ...

    def collect(self, spans: Any, num_rounds: int = 1) -> list[dict[str, float]]:
        """Return the seconds by stage of each of the first `num_rounds` rounds of `spans`. These rounds must have
        ended.

        A span around several rounds is divided equally among them.
        """
        ...
