"""Chains of units, each of which is several of the next. The thinking converts to the next unit at each step."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

# Real units keep their real whole factors; None stands for a factor that the story makes up.
CHAINS: tuple[tuple[tuple[str, ...], tuple[int | None, ...]], ...] = (
    (("ships", "carts", "crates", "jars"), (None, None, None)),
    (("rooms", "shelves", "boxes", "pens"), (None, None, None)),
    (("farms", "fields", "rows", "trees"), (None, None, None)),
    (("towns", "streets", "houses", "doors"), (None, None, None)),
    (("books", "parts", "pages", "lines"), (None, None, None)),
    (("trains", "cars", "seats", "bags"), (None, None, None)),
    (("gold", "silver", "copper", "tin"), (None, None, None)),
    (("miles", "furlongs", "chains", "rods"), (8, 10, 4)),
    (("weeks", "days", "hours"), (7, 24)),
    (("rods", "yards", "feet"), (None, 3)),
    (("gallons", "quarts", "pints", "cups"), (4, 2, 2)),
    (("stones", "pounds", "ounces"), (14, 16)),
)


@dataclass(frozen=True, slots=True)
class UnitsTask:
    """A quantity in several units. `quantities[i]` are given in unit i, and `factors[i]` of unit i + 1 make one of
    unit i. The question is the total in the last unit."""

    units: tuple[str, ...]
    factors: tuple[int, ...]
    quantities: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{' '.join(self.units)} {self.factors} {self.quantities}"

    def amounts(self) -> list[int]:
        """Return for each unit i the total of units 0 to i, in unit i."""
        amounts = [self.quantities[0]]
        for factor, quantity in zip(self.factors, self.quantities[1:], strict=True):
            amounts.append(amounts[-1] * factor + quantity)
        return amounts

    @property
    def answer(self) -> str:
        return str(self.amounts()[-1])

    def question(self, say: Phraser) -> str:
        rules = [
            say.sentence("{n} {small} [make|are|count as|are worth] one of the {large}", n=n, small=small, large=large)
            for n, small, large in zip(self.factors, self.units[1:], self.units[:-1], strict=True)
        ]
        say.random.shuffle(rules)
        stock = [f"{quantity} {unit}" for quantity, unit in zip(self.quantities, self.units, strict=True) if quantity]
        owned = say.sentence("{name} [has|owns|counts|holds] {stock}", stock=" and ".join(stock))
        closing = say.say("How many {unit} is [that|it] [in all|all told]?", unit=self.units[-1])
        return " ".join([*rules, owned, closing])

    def steps(self, say: Phraser) -> list[str]:
        sentences = []
        amounts = self.amounts()
        for index, factor in enumerate(self.factors):
            quantity = self.quantities[index + 1]
            result = amounts[index + 1]
            extra = ", [and |then |]{add} {n}[| more] {makes} {result}" if quantity else ""
            extra = say.say(extra, n=quantity, result=result)
            template = (
                "{so} [{amount} {large} [of|at|by|times] {factor}|{factor} [for each of|times|by] {amount} {large}]"
                "[ {makes}|, {that} {makes}|, we {have}|, i {have}] {product}{extra} {small}[|, {check}]"
            )
            sentences.append(
                say.sentence(
                    template,
                    amount=amounts[index],
                    large=self.units[index],
                    factor=factor,
                    extra=extra,
                    product=amounts[index] * factor,
                    small=self.units[index + 1],
                )
            )
        return sentences


def draw_units(random: Random, difficulty: Difficulty) -> UnitsTask:
    """Draw neighbouring units of a chain, the factors that are not fixed, and a quantity of each unit, which may be 0
    after the first."""
    knobs = difficulty.units
    units, known_factors = random.choice(CHAINS)
    num_units = min(draw_between(random, knobs.num_units), len(units))
    first = draw_between(random, (0, len(units) - num_units))
    last = first + num_units
    factors = tuple(
        known or draw_between(random, (3, knobs.largest_factor)) for known in known_factors[first : last - 1]
    )
    quantities = [draw_between(random, (2, knobs.largest_quantity))]
    for factor in factors:
        given = random.random() < 0.6
        quantities.append(draw_between(random, (1, factor - 1)) if given else 0)
    return UnitsTask(units[first:last], factors, tuple(quantities))
