"""Ordering puzzles: shuffled clues about neighbours in a line. The question is who is at a given place."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

PEOPLE = [
    "Ada",
    "Bob",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hana",
    "Ivan",
    "Jill",
    "Kurt",
    "Lena",
    "Max",
    "Nell",
    "Otto",
    "Pia",
    "Quinn",
    "Rolf",
    "Sue",
    "Tom",
    "Uma",
    "Vic",
]
# The word for "further to the front", with those for "further to the back", for the front end and for the back end.
RELATIONS = {
    "older": ("younger", "oldest", "youngest"),
    "taller": ("shorter", "tallest", "shortest"),
    "faster": ("slower", "fastest", "slowest"),
    "richer": ("poorer", "richest", "poorest"),
    "stronger": ("weaker", "strongest", "weakest"),
}
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


@dataclass(frozen=True, slots=True)
class OrderTask:
    """A line of people, and clues about neighbours in it. `clues[j]` is the place i if clue j is about the people at
    places i and i + 1, and `turned[j]` says whether it is told in reverse."""

    people: tuple[str, ...]
    relation: str
    clues: tuple[int, ...]
    turned: tuple[bool, ...]
    place: int

    @property
    def key(self) -> str:
        return f"{' '.join(self.people)} {self.relation} {self.clues} {self.turned} {self.place}"

    @property
    def answer(self) -> str:
        return self.people[self.place]

    def question(self, say: Phraser) -> str:
        behind, front_word, _ = RELATIONS[self.relation]
        sentences = []
        for clue, turned in zip(self.clues, self.turned, strict=True):
            left, right = self.people[clue : clue + 2]
            told_from_front = f"{left} is [just|one place] {self.relation} than {right}"
            told_from_back = f"{right} is [just|one place] {behind} than {left}"
            sentences.append(say.sentence(told_from_back if turned else told_from_front))
        closing = say.say(
            "[From the {front} on|Counting from the {front}|If the {front} is first], who is {place}?",
            front=front_word,
            place=PLACES[self.place],
        )
        return " ".join([*sentences, closing])

    def steps(self, say: Phraser) -> list[str]:
        _, front_word, back_word = RELATIONS[self.relation]
        place = PLACES[self.place]
        ends = [
            say.sentence(
                "{so} [nobody|no one|none] [beats|is ahead of|comes before|is above] {who}, "
                "[so|thus|and so|hence|that is] {front}",
                who=self.people[0],
                front=front_word,
            ),
            say.sentence(
                "[nobody|no one|none] [is under|is behind|comes after|is below] {who}, "
                "[so|thus|and so|hence|that is] {back}",
                who=self.people[-1],
                back=back_word,
            ),
        ]
        if say.random.random() < 0.5:
            ends.reverse()
        joiner = say.say("[, |, then | > | and | before ]")
        line = say.sentence(
            "{so} [the line|the row|the list|the order] [{is}|{makes}] {line}[|, {check}]",
            line=joiner.join(self.people),
        )
        found = say.sentence("{so} {place} {is} {who}", place=place, who=self.answer)
        return [*ends, line, found]


def draw_order(random: Random, difficulty: Difficulty) -> OrderTask:
    """Draw a line of people, clues about neighbours in random order, and the place that is asked for."""
    num_people = draw_between(random, difficulty.order.num_people)
    return OrderTask(
        people=tuple(random.sample(PEOPLE, num_people)),
        relation=random.choice(list(RELATIONS)),
        clues=tuple(random.sample(range(num_people - 1), num_people - 1)),
        turned=tuple(random.random() < difficulty.order.turned_clue_probability for _ in range(num_people - 1)),
        place=draw_between(random, (1, num_people - 2)),
    )
