"""Looking up two rows of a table in the prompt by different columns, and combining their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.order import PEOPLE
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

COLUMNS: dict[str, tuple[str, ...]] = {
    "name": tuple(PEOPLE),
    "colour": ("red", "blue", "green", "black", "white", "brown", "pink", "grey", "gold", "orange"),
    "animal": ("lion", "bear", "wolf", "fox", "owl", "frog", "bee", "deer", "seal", "goose"),
}
# No question names a row by its animal, since the price would then not follow the last cell that the thinking reads. A
# small model loses the row there (46 % right in a trial).
ASKED_COLUMNS = ("name", "colour")
COMBINATIONS = ("sum", "difference", "double the first less the second")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    colour: str
    animal: str
    price: int

    def cell(self, column: str) -> str:
        return {"name": self.name, "colour": self.colour, "animal": self.animal}[column]


@dataclass(frozen=True, slots=True)
class LookupTask:
    """A table and a question. `picks` has for each asked row its index, and the column by which it is named."""

    rows: tuple[Row, ...]
    picks: tuple[tuple[int, str], tuple[int, str]]
    combination: str

    @property
    def key(self) -> str:
        table = "; ".join(f"{row.name} {row.colour} {row.animal} {row.price}" for row in self.rows)
        return f"{table}; {self.picks}; {self.combination}"

    def _prices(self) -> tuple[int, int]:
        (first, _), (second, _) = self.picks
        return self.rows[first].price, self.rows[second].price

    @property
    def answer(self) -> str:
        first, second = self._prices()
        if self.combination == "sum":
            return str(first + second)
        if self.combination == "difference":
            return str(abs(first - second))
        return str(2 * first - second)

    def question(self, say: Phraser) -> str:
        table = "\n".join(f"{row.name} | {row.colour} | {row.animal} | {row.price}" for row in self.rows)
        first, second = (f"the {column} {self.rows[index].cell(column)}" for index, column in self.picks)
        opening = say.say("[{name} keeps|{friend} has|Here is|Look at] this table of prices:")
        asked = {
            "sum": "What is the price at {first} plus the price at {second}?",
            "difference": "How far apart are the price at {first} and the price at {second}?",
            "double the first less the second": "What is twice the price at {first} less the price at {second}?",
        }[self.combination]
        return f"{opening}\nname | colour | animal | price\n{table}\n{say.say(asked, first=first, second=second)}"

    def steps(self, say: Phraser) -> list[str]:
        found = []
        for index, column in self.picks:
            row = self.rows[index]
            others = [row.cell(other) for other in COLUMNS if other != column]
            template = (
                "{so} [{cell} {is} [{near} {others}|with {others}]|the row {with} {cell} {is} {others}]"
                "[, {that} {makes}| and {makes}|, we {have}| at|, price|, worth] {price}[|, {check}]"
            )
            spelled = say.say("[ and |, | with | plus ]").join(others)
            found.append(say.sentence(template, cell=row.cell(column), others=spelled, price=row.price))
        if say.random.random() < 0.5:
            found.reverse()
        first, second = self._prices()
        told = {
            "sum": "{first} {add} {second}",
            "difference": f"{max(first, second)} {{drop}} {min(first, second)}",
            "double the first less the second": "[twice {first}|{first} and {first}] {drop} {second}",
        }[self.combination]
        total = say.sentence(
            f"{{so}} {told}[ {{makes}}|, {{that}} {{makes}}|, we {{have}}] {{answer}}",
            first=first,
            second=second,
            answer=self.answer,
        )
        return [*found, total]


def draw_lookup(random: Random, difficulty: Difficulty) -> LookupTask:
    """Draw a table, two of its rows, and how their prices are combined. The result is never negative."""
    knobs = difficulty.lookup
    num_rows = draw_between(random, knobs.num_rows)
    names, colours, animals = (random.sample(values, num_rows) for values in COLUMNS.values())
    prices = random.sample(range(11, knobs.largest_number + 1), num_rows)
    rows = tuple(Row(*cells) for cells in zip(names, colours, animals, prices, strict=True))
    first, second = random.sample(range(num_rows), 2)
    combination = random.choice(COMBINATIONS)
    if combination == COMBINATIONS[-1] and 2 * rows[first].price < rows[second].price:
        first, second = second, first
    columns_named = random.sample(ASKED_COLUMNS, 2)
    return LookupTask(rows, ((first, columns_named[0]), (second, columns_named[1])), combination)
