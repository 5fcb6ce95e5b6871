"""The main parts that a record is built from: the run, its timed passes, and its divergences from plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spec_lab.record.provenance import Provenance
from spec_lab.record.schema import (
    DivergenceKind,
)

if TYPE_CHECKING:
    from spec_lab.core.results import GenerationResult, RequestRecord, RoundRecord


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts about a run that are known before it decodes.

    Attributes:
        name: the user's name for it.
        choices: the name of each group's choice (`spec_lab.app.labels`), such as `{"prune": "catchup"}` or
            `{"sampling": "temperature0.7"}`.
        config: the resolved config, plain values only, paths as the user gave them.
        started_at: UTC, ISO 8601, to the microsecond.
    """

    name: str
    choices: dict[str, str]
    config: dict[str, Any]
    provenance: Provenance
    started_at: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration: a result for each timed repeat, and by request id the findings on the first repeat's outputs.

    Attributes:
        correct: whether the answer was correct; None for one that was not checked.
        num_thinking_tokens: number of output tokens inside thinking; None if the tokenizer has no markers.
    """

    repeats: Sequence[GenerationResult] = ()
    correct: Mapping[str, bool | None] = field(default_factory=dict)
    num_thinking_tokens: Mapping[str, int] | None = None

    @property
    def requests(self) -> list[RequestRecord]:
        """Return the requests of the first repeat, from which tokens, acceptance and accuracy are counted."""
        return self.repeats[0].requests if self.repeats else []

    @property
    def rounds(self) -> list[RoundRecord]:
        """Return the rounds of the first repeat."""
        return self.repeats[0].rounds if self.repeats else []

    @property
    def num_draft_tokens(self) -> int:
        return self.repeats[0].num_draft_tokens if self.repeats else 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token of a request that differs from plain decoding.

    Attributes:
        index: its index in `output_ids`; the length of the shorter output if one is a prefix of the other.
        margin: plain decoding's top-2 logit difference there; None if it was not computed.
        kind: `near_tie`, `bug`, or `lossy` under a rule that may differ.
    """

    request_id: str
    index: int
    margin: float | None
    kind: DivergenceKind
