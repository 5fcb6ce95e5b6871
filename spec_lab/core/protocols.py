"""The promises of a round's parts to it and to one another: target, drafter, acceptance rule and timer.

Implementations are in `spec_lab.models`, `spec_lab.drafters`, `spec_lab.acceptance` and `spec_lab.engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.prompts import PromptPack
from spec_lab.core.types import (
    AcceptanceInputs,
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
    """The model whose distribution the output must follow."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        selection: RowSelection,
        features: FeatureSpec,
    ) -> TargetOutput:
        """Run [rows] tokens; write their KV; in the last layer only the selected rows go on.

        Features are of all rows, except `final_hidden`, which is of the kept ones.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] after the final norm into logits [rows, vocab_size]."""
        ...


class HostDrafter(Protocol):
    """Drafts on the host, when it has read a round and before it launches the next.

    Attributes:
        num_on_device: drafts that the device makes of each request, 0 where all come from the host; a round in which
            the host has none needs no more rows for them.
        part_names: of what drafts on the host and on the device, as a record has them; None where one part drafts.
    """

    num_on_device: int
    part_names: tuple[str, str] | None

    def restart(self) -> None:
        """Forget all requests, so that a pass over a workload knows nothing of the one before."""
        ...

    def draft(self, sequences: Sequence[RunningRequest]) -> list[list[int] | None]:
        """Return at most K drafts behind the pending token of each request; None keeps what the device drafted."""
        ...

    def finish(self, sequence: RunningRequest) -> None:
        """Take note that a request has ended, and leaves its slot."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterRequirements:
    """The needs of a drafter, which the other parts have to meet.

    Attributes:
        features: the target's hidden states it reads.
        catchup_rows: rows a request of each pass of the catch-up step, of which one is live: (N,) for a layer that is
            reused, (N, N + 1, ...) for a module for each draft, () for a drafter without such a step.
        distinct_steps: the steps of a round differ in more than their column (other weights), so that each needs a
            graph of its own.
        learn_continuations: takes the plain outputs by request id before anything is timed; None for a drafter that
            does not replay them.
        draft_rest: turns the state with draft 1 into all drafts [batch, K] at once, metadata moved on the way; None
            where the round runs `step` for each.
        has_loop: drafts are made one behind the other; False where all of them are there with the first.
        on_host: drafts on the host, beside what the device does; None where nothing does.
        count_catchup: counts the rows that a catch-up step computes, from the tokens that each request of a round
            emitted and the rows of each that were verified; None where they are those that a pruning counts.
    """

    features: FeatureSpec = field(default_factory=FeatureSpec)
    catchup_rows: tuple[int, ...] = ()
    distinct_steps: bool = False
    learn_continuations: Callable[[Mapping[str, Sequence[int]]], None] | None = None
    draft_rest: Callable[[Any], torch.Tensor] | None = None
    has_loop: bool = True
    on_host: HostDrafter | None = None
    count_catchup: Callable[[Sequence[int], int], int] | None = None

    @property
    def catches_up(self) -> bool:
        """Says whether `prune.catchup` has something to prune."""
        return bool(self.catchup_rows)

    def rows_of_passes(self, num_verified: int) -> tuple[int, ...]:
        """Return the rows a request of each pass behind a round that verified so many: a layer that is reused runs
        those, a module for each draft keeps a window of its own."""
        return self.catchup_rows if self.distinct_steps else (num_verified,) * len(self.catchup_rows)


class DraftState(Protocol):
    """State of a draft between the steps of one round.

    Attributes:
        tokens: [batch] the newest draft, in target ids.
        attention: one-row metadata that moves a position before each step, in place; None where nothing moves.
    """

    tokens: torch.Tensor
    attention: AttentionMetadata | None


State = TypeVar("State", bound=DraftState)


class Drafter(Protocol[State]):
    """Proposes `num_draft_tokens` tokens a round: `catch_up` gives the first, each `step` one more."""

    num_draft_tokens: int
    requirements: DrafterRequirements

    def admit(self, slot: int, request: Request) -> None:
        """Clear what an earlier request left in `slot`."""
        ...

    def ingest(self, pack: PromptPack) -> State | None:
        """Take stretches of prompts. Return the state with the first draft of those that end there, None where none
        does."""
        ...

    def catch_up(self, verified: VerifiedRound) -> State:
        """Take a verified round, and return the state with draft 1. A round may have verified fewer than K drafts.

        A drafter with a cache of its own catches up with what the round emitted. For a drafter without one (frozen-KV,
        lookup, random) there is nothing to catch up with: this is its first draft step, from the last accepted row.
        """
        ...

    def step(self, state: State, step: DraftStep) -> None:
        """Replace `state.tokens` by the next draft. `state.attention` has been moved already."""
        ...

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the [batch, K, vocab] logits of what the drafts of `slot_ids` were sampled from; None when they are
        given."""
        ...


@dataclass(frozen=True, slots=True)
class RuleTraits:
    """The properties of a rule that a run has to know.

    Attributes:
        lossless: the output follows the target's distribution (at temperature 0, its argmax).
        imposed: acceptance is set and not earned, so acceptance lengths and answers say nothing about the models.
        reads_draft_logits: the drafter has to sample, and to keep the logits of what it sampled from.
    """

    lossless: bool
    imposed: bool = False
    reads_draft_logits: bool = False


class AcceptanceRule(Protocol):
    """Turns logits and drafts into emitted tokens; no model in it. State, if any, is a tensor row a slot."""

    traits: RuleTraits

    def admit(self, slot: int, request: Request) -> None:
        """Set the slot's state from the whole prompt, over what an earlier request left."""
        ...

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        """Choose the token [batch] behind each prompt of `kv_lens` [batch] tokens, from logits [batch, vocab]."""
        ...

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        """Judge one round. Touches device tensors only."""
        ...


class StageTimer(Protocol):
    """Measures named spans inside a round."""

    def round(self, num_rounds: int = 1) -> AbstractContextManager[None]:
        """Forgets the round before; `num_rounds` are launched at once."""
        ...

    def inner_round(self, index: int) -> AbstractContextManager[None]:
        """While several rounds are captured in one graph: the spans inside are those of round `index`."""
        ...

    def unmarked(self) -> AbstractContextManager[None]:
        """Inside, spans are not measured: a stretch of a graph that may hold no mark."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]: ...

    def reading(self) -> AbstractContextManager[None]:
        """While the host waits for a round's results: a part of `readback` where the host's clock measures spans."""
        ...

    def capture(self) -> AbstractContextManager[list[Any]]:
        """While a graph is captured: spans become marks inside the graph, where there is such a thing."""
        ...

    def replay(self, name: str, marks: list[Any]) -> AbstractContextManager[None]:
        """Around a replay of segment `name`; its time counts as that of the marked spans, or without marks as one."""
        ...

    @property
    def spans(self) -> Any:
        """Return what holds the spans of the rounds launched last, for `collect` behind the next launch."""
        ...

    def collect(self, spans: Any, num_rounds: int = 1) -> list[dict[str, float]]:
        """Return the seconds by name of each of the first `num_rounds` of the rounds that `spans` are of, which have
        ended.

        A span that holds several rounds, or lies around them, is shared by them equally.
        """
        ...
