"""Lists of numbers that are changed step by step. This is the easy category, since every list is written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

Numbers = tuple[int, ...]

OPERATIONS: dict[str, Callable[[Numbers], Numbers]] = {
    "reverse the list": lambda numbers: numbers[::-1],
    "sort it upwards": lambda numbers: tuple(sorted(numbers)),
    "sort it downwards": lambda numbers: tuple(sorted(numbers, reverse=True)),
    "drop the largest": lambda numbers: _without(numbers, max(numbers)),
    "drop the smallest": lambda numbers: _without(numbers, min(numbers)),
    "drop the first": lambda numbers: numbers[1:],
    "drop the last": lambda numbers: numbers[:-1],
    "move the first to the end": lambda numbers: (*numbers[1:], numbers[0]),
    "move the last to the front": lambda numbers: (numbers[-1], *numbers[:-1]),
    "swap the two ends": lambda numbers: (numbers[-1], *numbers[1:-1], numbers[0]),
    "add 7 to each": lambda numbers: tuple(number + 7 for number in numbers),
    "double each": lambda numbers: tuple(2 * number for number in numbers),
}
# Each question, and the function that takes its one or two numbers from the list.
PICKS: dict[str, Callable[[Numbers], Numbers]] = {
    "the second number": lambda numbers: numbers[1:2],
    "the last number": lambda numbers: numbers[-1:],
    "the sum of the first two": lambda numbers: numbers[:2],
    "the sum of the two ends": lambda numbers: (numbers[0], numbers[-1]),
    "the largest less the smallest": lambda numbers: (max(numbers), min(numbers)),
}


def _without(numbers: Numbers, element: int) -> Numbers:
    position = numbers.index(element)
    return numbers[:position] + numbers[position + 1 :]


def _spell(numbers: Numbers) -> str:
    return ", ".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class ListsTask:
    """Successive operations on a list. The question is about one or two elements of the result."""

    numbers: Numbers
    operations: tuple[str, ...]
    wanted: str

    @property
    def key(self) -> str:
        return "; ".join([_spell(self.numbers), *self.operations, self.wanted])

    @property
    def answer(self) -> str:
        numbers = self.numbers
        for operation in self.operations:
            numbers = OPERATIONS[operation](numbers)
        return str(self._join(PICKS[self.wanted](numbers)))

    def _join(self, picked: Numbers) -> int:
        return picked[0] - picked[1] if "less" in self.wanted else sum(picked)

    def question(self, say: Phraser) -> str:
        opening = say.sentence(
            "{name} [has|writes|notes|gives] [the list|the numbers] {numbers}", numbers=_spell(self.numbers)
        )
        operations = say.sentence("; ".join(self.operations))
        closing = say.say("[What is|Tell me|Give me|Find] {wanted}.", wanted=self.wanted)
        return " ".join([opening, operations, closing])

    def steps(self, say: Phraser) -> list[str]:
        numbers = self.numbers
        sentences = [say.sentence("[start|begin|we start|i start] with {numbers}", numbers=_spell(numbers))]
        for operation in self.operations:
            numbers = OPERATIONS[operation](numbers)
            template = "{so} {operation}: {numbers}"
            sentences.append(say.sentence(template, operation=operation, numbers=_spell(numbers)))
        picked = PICKS[self.wanted](numbers)
        spelled = say.say("[ less | minus ]" if "less" in self.wanted else "[ plus | and ]").join(map(str, picked))
        if len(picked) == 2:
            spelled += say.say("[, which is |, that is |, so |: ]{result}", result=self._join(picked))
        sentences.append(say.sentence("{so} {wanted} is {spelled}", wanted=self.wanted, spelled=spelled))
        return sentences


def draw_lists(random: Random, difficulty: Difficulty) -> ListsTask:
    """Draw different numbers, different operations on them, and the question."""
    knobs = difficulty.lists
    length = draw_between(random, knobs.length)
    numbers = tuple(random.sample(range(2, knobs.largest_element), length))
    operations = tuple(random.sample(list(OPERATIONS), draw_between(random, knobs.num_operations)))
    return ListsTask(numbers, operations, random.choice(list(PICKS)))
