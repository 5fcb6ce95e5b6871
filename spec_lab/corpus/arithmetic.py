"""Stories of an amount that grows and shrinks. In a long story, the thinking takes the first events two at a time."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from spec_lab.corpus.difficulty import Arithmetic, Difficulty
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

THINGS = [
    "apples",
    "pens",
    "cups",
    "coins",
    "books",
    "eggs",
    "stamps",
    "nails",
    "cards",
    "shells",
    "beads",
    "maps",
    "keys",
    "plums",
    "bricks",
    "seeds",
]

_EVENT_TEMPLATES = {
    "+": "[{name} [gets|finds|makes|wins]|{friend} [brings|gives|sends|adds]] [{n} more|another {n}|{n} new ones]",
    "-": "[{name} [sells|loses|breaks|gives away|drops]|{friend} [takes|steals|buys|borrows]] {n}[| of them]",
    "*": "[the {label} grows to|then there are|now there are|it becomes] {n} times as many",
    "/": "[the {label} is cut|all is split|it is shared|they are put] into {n} equal parts and one [is kept|stays]",
}
_STEP_TEMPLATES = {
    "+": "{add} {n}",
    "-": "{drop} {n}",
    "*": "[times {n}|{n} times that|{n} fold]",
    "/": "[split in {n}|over {n}|cut by {n}|shared by {n}]",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the amount: `operator` is one of + - * /."""

    operator: str
    operand: int

    def apply(self, amount: int) -> int:
        if self.operator == "+":
            return amount + self.operand
        if self.operator == "-":
            return amount - self.operand
        if self.operator == "*":
            return amount * self.operand
        return amount // self.operand


@dataclass(frozen=True, slots=True)
class ArithmeticTask:
    """A story of an amount that changes. The question is the final amount."""

    thing: str
    start: int
    events: tuple[Event, ...]
    most_results: int

    @property
    def key(self) -> str:
        return f"{self.start}" + "".join(f"{event.operator}{event.operand}" for event in self.events)

    @property
    def answer(self) -> str:
        amount = self.start
        for event in self.events:
            amount = event.apply(amount)
        return str(amount)

    def question(self, say: Phraser) -> str:
        opening = say.sentence(
            "{name} [has|owns|keeps|holds] [a {label} of |]{start} {thing}", start=self.start, thing=self.thing
        )
        events = [say.sentence(_EVENT_TEMPLATES[event.operator], n=event.operand) for event in self.events]
        closing = say.say("How many {thing} [are there|are left|remain|is that] [now|at the end]?", thing=self.thing)
        return " ".join([opening, *events, closing])

    def _groups(self) -> list[tuple[Event, ...]]:
        """Group the events, so that the thinking states a result for each group. The first groups are pairs, so that
        up to 2 * `most_results` events make at most `most_results` groups."""
        num_pairs = max(0, len(self.events) - self.most_results)
        pairs = [self.events[2 * index : 2 * index + 2] for index in range(num_pairs)]
        return pairs + [(event,) for event in self.events[2 * num_pairs :]]

    def steps(self, say: Phraser) -> list[str]:
        amount = self.start
        sentences = []
        for events in self._groups():
            moves = say.say("[, | and | then |, then |, and ]").join(
                say.say(_STEP_TEMPLATES[event.operator], n=event.operand) for event in events
            )
            before = amount
            for event in events:
                amount = event.apply(amount)
            template = (
                "{so} [{before} {moves}|{with} {before}, {moves}|the {label} [{is}|of] {before}, {moves}]"
                "[ {makes}|, {that} {makes}|, we {have}|, i {have}] {amount}[|, {check}]"
            )
            sentences.append(say.sentence(template, before=before, moves=moves, amount=amount))
        return sentences


def draw_arithmetic(random: Random, difficulty: Difficulty) -> ArithmeticTask:
    """Draw a story whose amount stays a whole number within bounds."""
    knobs = difficulty.arithmetic
    start = draw_between(random, (12, 99))
    events: list[Event] = []
    amount = start
    for _ in range(draw_between(random, knobs.num_events)):
        event = _draw_event(random, knobs, amount)
        amount = event.apply(amount)
        events.append(event)
    return ArithmeticTask(random.choice(THINGS), start, tuple(events), knobs.most_results)


def _draw_event(random: Random, knobs: Arithmetic, amount: int) -> Event:
    """Draw an event that keeps the amount whole, at least 2, and at most `largest_amount`."""
    while True:
        operator = "++--*/"[int(random.random() * 6)]
        if operator in "+-":
            event = Event(operator, draw_between(random, (6, knobs.largest_step)))
        else:
            event = Event(operator, draw_between(random, (2, knobs.largest_factor)))
        if operator == "/" and amount % event.operand:
            continue
        if 2 <= event.apply(amount) <= knobs.largest_amount:
            return event
