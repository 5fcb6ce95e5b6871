"""Every knob that makes the corpus harder or easier, in one place.

Two things are turned separately: how much of the work the model does in its head (accuracy falls), and how much free
prose stands between the steps (uncertain rows rise, acceptance length falls).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prose:
    """Text around the work. Ranges are inclusive and drawn evenly."""

    num_scene_facts: tuple[int, int] = (2, 3)  # sentences of the prompt that state the scene
    num_remarks: tuple[int, int] = (0, 2)  # sentences of the thinking drawn from the grammar
    note_probability: float = 0.4  # a half-finished natural sentence in the prompt, completed in the thinking
    note_opening_words: tuple[int, int] = (2, 4)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Sets how long the stories are, and how large their numbers."""

    num_events: tuple[int, int] = (3, 5)
    most_results: int = 3  # of a longer story, some results cover two events: the first of them is done in the head
    largest_step: int = 89  # of what is added or taken away
    largest_factor: int = 12
    largest_amount: int = 999


@dataclass(frozen=True, slots=True)
class Lists:
    """Sets how long the lists are, and how much is done to them."""

    length: tuple[int, int] = (5, 6)  # 5 or more: three operations may drop one each, and two must remain
    num_operations: tuple[int, int] = (2, 3)
    largest_element: int = 99


@dataclass(frozen=True, slots=True)
class Trace:
    """Sets how often the loop turns, and how large its numbers are."""

    num_rounds: tuple[int, int] = (2, 2)
    largest_start: int = 12
    modulus: tuple[int, int] = (7, 19)
    largest_factor: int = 4


@dataclass(frozen=True, slots=True)
class Dates:
    """Sets which years dates lie in, and how far they are moved."""

    years: tuple[int, int] = (1990, 2039)
    later_by: tuple[int, int] = (25, 60)  # days; more than is taken back, so that the day moves on
    earlier_by: tuple[int, int] = (2, 20)


@dataclass(frozen=True, slots=True)
class Units:
    """Sets how many units a quantity is given in, and how large its numbers are."""

    largest_quantity: int = 12
    largest_factor: int = 19
    num_units: tuple[int, int] = (3, 3)


@dataclass(frozen=True, slots=True)
class Order:
    """Sets how many stand in line, and how often a clue is told the other way round."""

    num_people: tuple[int, int] = (5, 6)
    turned_clue_probability: float = 0.4


@dataclass(frozen=True, slots=True)
class Lookup:
    """Sets how many rows a table has, and how large its numbers are."""

    num_rows: tuple[int, int] = (3, 5)
    largest_number: int = 89


@dataclass(frozen=True, slots=True)
class Difficulty:
    """The knobs of every checkable category. `lists` is kept plain on purpose: it is the easy end of the scale."""

    prose: Prose = Prose()
    lists_prose: Prose = Prose(num_scene_facts=(0, 1), num_remarks=(0, 1), note_probability=0.0)
    arithmetic: Arithmetic = Arithmetic()
    lists: Lists = Lists()
    trace: Trace = Trace()
    dates: Dates = Dates()
    units: Units = Units()
    order: Order = Order()
    lookup: Lookup = Lookup()
