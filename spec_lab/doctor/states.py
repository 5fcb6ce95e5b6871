"""Checks the layers that keep a state, by comparing rounds with prompt passes over the text so far.

Rejected drafts must not change the state, which cannot be seen on the host. So a request is decoded with random drafts,
and a script says how many of them are accepted. Every round's logits are compared with the logits of a prompt pass over
the same tokens. If they differ, the rounds are repeated for one common mistake after another, with that mistake hidden.
For most mistakes, the correct state or convolution inputs are copied before each round to where the mistake would read
them. The first repetition with correct logits identifies the mistake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.config.option import get
from spec_lab.core.recurrent_cache import RecurrentRows
from spec_lab.core.types import AcceptanceInputs, Verification
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.subject import Subject
from spec_lab.engine.engine import Engine
from spec_lab.engine.teacher import TeacherForcing

CHECK = "states of layers"
NUM_TOKENS = 24
# As fractions of the largest logit. Rounding in another order changed float32 logits by 1e-5 of it, and bfloat16 logits
# by a few hundredths. The state of a wrong row changes them by a tenth or more.
MAX_DIFFERENCE_FLOAT32, MAX_DIFFERENCE_16_BIT = 0.01, 0.1


@dataclass(slots=True)
class ProbingRule(StrictAcceptance):
    """A rule that accepts as many drafts as a script says, and compares each round's logits with a prompt pass's.

    Attributes:
        script: number of accepted drafts for each round; it repeats from the beginning.
        last: the last row that was accepted in the round before.
        worst: the largest difference so far, as a fraction of the largest logit.
    """

    engine: Engine
    teacher: TeacherForcing
    script: Sequence[int]
    num_rounds: int = 0
    last: int = 0
    worst: float = 0.0

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        num_drafts = inputs.draft_tokens.shape[1]
        (sequence,) = self.engine.scheduler.running
        text = [*sequence.tokens, *inputs.draft_tokens[0].tolist()]
        expected = self.teacher.logits(text)[-num_drafts - 1 :]
        difference = (inputs.logits[0].float() - expected).abs().max() / expected.abs().max()
        self.worst = max(self.worst, float(difference.nan_to_num(float("inf"))))
        self.last = min(num_drafts, self.script[self.num_rounds % len(self.script)])
        self.num_rounds += 1
        tokens = inputs.logits.argmax(dim=-1)
        tokens[:, : self.last] = inputs.draft_tokens[:, : self.last]
        return Verification(tokens, torch.where(inputs.active, self.last + 1, 0))


@dataclass(frozen=True, slots=True)
class Mistake:
    """A common mistake, and what hides it: nothing, for one that shows only after a round that accepts all drafts.

    Attributes:
        state_row, inputs_row: from the last accepted row to the one whose state, or first input of the convolution, the
            mistake would read.
        sets_index: whether the index that commit sets is put right.
    """

    cause: str
    state_row: Callable[[int], int] | None = None
    inputs_row: Callable[[int], int] | None = None
    sets_index: bool = False

    def hide(self, cache: Any, slot: int, row: int, num_drafts: int) -> None:
        """Copy what belongs to the last accepted row of one layer's cache to where the mistake would read it."""
        states, inputs = cache.states, cache.windows.inputs
        # A cache that replays has one state for each slot.
        if self.state_row is not None and states.dim() == 5 and 0 <= (wrong := self.state_row(row)) < states.shape[1]:
            states[slot, wrong] = states[slot, row].clone()
        if self.inputs_row is not None and 0 <= (wrong := self.inputs_row(row)) <= num_drafts:
            history = inputs.shape[1] - num_drafts
            inputs[slot, wrong : wrong + history] = inputs[slot, row : row + history].clone()


@dataclass(slots=True)
class PlacedStates:
    """Wraps `states`, and hides a mistake before each round."""

    states: Any
    caches: Sequence[Any]
    rule: ProbingRule
    num_drafts: int
    mistake: Mistake

    def of_round(self, slot_ids: torch.Tensor) -> RecurrentRows:
        slot, row = int(slot_ids[0]), self.rule.last
        for cache in self.caches:
            self.mistake.hide(cache, slot, row, self.num_drafts)
        rows: RecurrentRows = self.states.of_round(slot_ids)
        if self.mistake.sets_index:
            rows.committed = torch.full_like(rows.committed, row)
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.states, name)


STATE, INPUTS = "rollback index: a round begins with the state", "convolution offset: its inputs are read"
MISTAKES = (
    Mistake("rollback index: a round is wrong if all drafts of the round before were accepted, and only then"),
    Mistake("rollback index: the index that commit sets is not n - 1, the last accepted row", sets_index=True),
    Mistake(f"{STATE} one row after the last accepted one", state_row=lambda row: row + 1),
    Mistake(f"{STATE} one row before the last accepted one", state_row=lambda row: row - 1),
    Mistake(f"{STATE} after its first row, whatever was accepted", state_row=lambda row: 0),
    Mistake(f"{INPUTS} one row after the last accepted one", inputs_row=lambda row: row + 1),
    Mistake(f"{INPUTS} one row before the last accepted one", inputs_row=lambda row: row - 1),
    Mistake(f"{INPUTS} from the first row on, whatever was accepted", inputs_row=lambda row: 0),
)


def check_states(subject: Subject) -> Finding:
    """Compare rounds of random drafts with prompt passes. Name a common mistake that explains a difference, if any."""
    if not subject.models.target.config.keeps_states:
        return does_not_apply(CHECK, "no layer of the target keeps a state")
    teacher = subject.greedy_teacher()
    difference, num_rounds = _worst_difference(subject, teacher)
    measured = f"logits of {num_rounds} rounds at most {difference:.1e} of the largest from those of a prompt pass"
    most = MAX_DIFFERENCE_FLOAT32 if subject.models.dtype == torch.float32 else MAX_DIFFERENCE_16_BIT
    if difference <= most:
        return Finding(CHECK, Verdict.OK, measured)
    for mistake in MISTAKES:
        if _worst_difference(subject, teacher, mistake)[0] <= most:
            return Finding(CHECK, Verdict.FAULT, measured, mistake.cause)
    cause = "a round begins with a wrong state, or leaves one; compare kernels=torch and the other recurrent.rollback"
    return Finding(CHECK, Verdict.FAULT, measured, cause)


def _worst_difference(subject: Subject, teacher: TeacherForcing, mistake: Mistake | None = None) -> tuple[float, int]:
    """Decode one request, with `mistake` hidden. Return the largest difference, and the number of rounds."""
    drafter = get("drafter", "random")(num_draft_tokens=subject.num_draft_tokens)
    eager = get("graph", "eager")()
    engine = subject.engine(dataclasses.replace(subject.config, graph=eager, drafter=drafter))
    most = subject.num_draft_tokens
    # With a mistake and K > 1, no round accepts all drafts: the row after the last one is outside the cache.
    script = (most, 0, 1, most, most - 1) if mistake is None else (most - 1, 0, 1, most - 1)
    rule = ProbingRule(engine, teacher, script)
    engine.parts.rule = rule
    if mistake is not None:
        slots = engine.parts.slots
        states: Any = PlacedStates(slots.states, engine.parts.cache.recurrent, rule, most, mistake=mistake)
        slots.states = states
    first = subject.requests[0]
    length = min(first.max_new_tokens, NUM_TOKENS)
    engine.generate([dataclasses.replace(first, max_new_tokens=length, ignore_eos=True)])
    return rule.worst, rule.num_rounds
