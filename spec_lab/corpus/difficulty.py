"""The knobs that make the corpus harder or easier.

They set accuracy and acceptance length separately. The more work the thinking does not write out, the lower the
accuracy. More free prose between the steps gives more uncertain tokens, and so a lower acceptance length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prose:
    """Text around the solution. Ranges are inclusive and drawn uniformly."""

    num_scene_facts: tuple[int, int] = (2, 3)  # sentences of the prompt, besides the one about the items
    num_remarks: tuple[int, int] = (0, 2)  # sentences of the thinking drawn from the grammar
    note_probability: float = 0.4  # a half-finished natural sentence in the prompt, completed in the thinking
    note_opening_words: tuple[int, int] = (2, 4)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The length of the stories, and the size of their numbers."""

    num_events: tuple[int, int] = (3, 5)
    most_results: int = 3  # a longer story states its first results only after every second event
    largest_step: int = 89  # the largest number that is added or subtracted
    largest_factor: int = 12
    largest_amount: int = 999


@dataclass(frozen=True, slots=True)
class Lists:
    """The length of the lists, and the number of operations on them."""

    length: tuple[int, int] = (5, 6)  # 5 or more: three operations may drop one each, and two must remain
    num_operations: tuple[int, int] = (2, 3)
    largest_element: int = 99  # exclusive


@dataclass(frozen=True, slots=True)
class Trace:
    """The number of iterations of the loop, and the size of its numbers."""

    num_rounds: tuple[int, int] = (2, 2)
    largest_start: int = 12
    modulus: tuple[int, int] = (7, 19)
    largest_factor: int = 4


@dataclass(frozen=True, slots=True)
class Dates:
    """The years of the dates, and how far they are moved."""

    years: tuple[int, int] = (1990, 2039)
    later_by: tuple[int, int] = (25, 60)  # days; more than `earlier_by`, so that the date ends up later
    earlier_by: tuple[int, int] = (2, 20)


@dataclass(frozen=True, slots=True)
class Units:
    """The number of units of a quantity, and the size of its numbers."""

    largest_quantity: int = 12
    largest_factor: int = 19
    num_units: tuple[int, int] = (3, 3)


@dataclass(frozen=True, slots=True)
class Order:
    """The number of people in the line, and how often a clue is told in reverse."""

    num_people: tuple[int, int] = (5, 6)
    turned_clue_probability: float = 0.4


@dataclass(frozen=True, slots=True)
class Lookup:
    """The number of rows of a table, and the size of its numbers."""

    num_rows: tuple[int, int] = (3, 5)
    largest_number: int = 89


@dataclass(frozen=True, slots=True)
class Difficulty:
    """The knobs of every checkable category. `lists` is meant to be the easiest one."""

    prose: Prose = Prose()
    lists_prose: Prose = Prose(num_scene_facts=(0, 1), num_remarks=(0, 1), note_probability=0.0)
    arithmetic: Arithmetic = Arithmetic()
    lists: Lists = Lists()
    trace: Trace = Trace()
    dates: Dates = Dates()
    units: Units = Units()
    order: Order = Order()
    lookup: Lookup = Lookup()
