"""Small Python programs: a loop with a remainder, then a branch. The question is their output."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

VARIABLES = "abcdkmnpqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class TraceTask:
    """A program with a loop of `x = (x * factor + y) % modulus; y = y + stride`, then a branch and a print."""

    x_name: str
    y_name: str
    x: int
    y: int
    factor: int
    modulus: int
    stride: int
    num_rounds: int
    if_less: int
    otherwise: int

    @property
    def key(self) -> str:
        return (
            f"{self.x} {self.y} {self.factor} {self.modulus} {self.stride} {self.num_rounds} "
            f"{self.if_less} {self.otherwise}"
        )

    @property
    def source(self) -> str:
        x, y = self.x_name, self.y_name
        return (
            f"{x} = {self.x}\n{y} = {self.y}\n"
            f"for i in range({self.num_rounds}):\n"
            f"    {x} = ({x} * {self.factor} + {y}) % {self.modulus}\n"
            f"    {y} = {y} + {self.stride}\n"
            f"if {x} < {y}:\n    {x} = {x} + {self.if_less}\nelse:\n    {x} = {x} - {self.otherwise}\n"
            f"print({x} + {y})"
        )

    def rounds(self) -> list[tuple[int, int]]:
        """Return (x, y) after each iteration of the loop."""
        x, y = self.x, self.y
        states = []
        for _ in range(self.num_rounds):
            x = (x * self.factor + y) % self.modulus
            y = y + self.stride
            states.append((x, y))
        return states

    def _after_branch(self) -> int:
        x, y = self.rounds()[-1]
        return x + self.if_less if x < y else x - self.otherwise

    @property
    def answer(self) -> str:
        return str(self._after_branch() + self.rounds()[-1][1])

    def question(self, say: Phraser) -> str:
        opening = say.say(
            "[What does this print?|What will this print?|Run this by hand.|Tell {name} what this prints.]"
        )
        return f"{opening}\n{self.source}"

    def steps(self, say: Phraser) -> list[str]:
        names = {"x": self.x_name, "y": self.y_name}
        sentences = [
            say.sentence(
                "[{start}|{first}] {x} {is} {x_value} and {y} {is} {y_value}",
                x_value=self.x,
                y_value=self.y,
                **names,
            )
        ]
        before, y_before = self.x, self.y
        for number, (x, y) in enumerate(self.rounds(), start=1):
            template = (
                "[{so}|round {number}|turn {number}|loop {number}] {x} times {factor} {add} {y_value} {makes} {raw}, "
                "[mod|past|over] {modulus} [that|it|this] [is|leaves|gives] {x_value}"
                "[,| and|, then|, now] {y} {y_next}[|, {check}]"
            )
            sentences.append(
                say.sentence(
                    template,
                    number=number,
                    factor=self.factor,
                    raw=before * self.factor + y_before,
                    modulus=self.modulus,
                    x_value=x,
                    y_value=y_before,
                    y_next=y,
                    x=before,
                    y=self.y_name,
                )
            )
            before, y_before = x, y
        x, y = self.rounds()[-1]
        relation = "less" if x < y else "not less"
        template = "{so} {x} {is} {relation} than {y}, [so|and|then|thus|now] {x} {makes} {x_value}"
        sentences.append(say.sentence(template, relation=relation, x_value=self._after_branch(), **names))
        total = say.sentence(
            "{so} {x_value} {add} {y_value} {makes} {answer}",
            x_value=self._after_branch(),
            y_value=y,
            answer=self.answer,
        )
        return [*sentences, total]


def draw_trace(random: Random, difficulty: Difficulty) -> TraceTask:
    """Draw the program's numbers, with its number of iterations."""
    knobs = difficulty.trace
    x_name, y_name = random.sample(VARIABLES, 2)
    return TraceTask(
        x_name=x_name,
        y_name=y_name,
        x=draw_between(random, (2, knobs.largest_start)),
        y=draw_between(random, (2, knobs.largest_start)),
        factor=draw_between(random, (2, knobs.largest_factor)),
        modulus=draw_between(random, knobs.modulus),
        stride=draw_between(random, (1, 5)),
        num_rounds=draw_between(random, knobs.num_rounds),
        if_less=draw_between(random, (3, 29)),
        otherwise=draw_between(random, (1, 9)),
    )
