"""A date that is moved later and then earlier. The question is the final weekday and date."""

from __future__ import annotations

from calendar import monthrange
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.task import draw_between

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
EVENTS = ["party", "meeting", "match", "trip", "test", "show", "fair", "talk", "wedding", "race", "sale", "feast"]


def _spell(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]}"


@dataclass(frozen=True, slots=True)
class DatesTask:
    """A date that is moved `later_by` days later and then `earlier_by` days earlier. The question is the final day."""

    event: str
    start: date
    later_by: int
    earlier_by: int

    @property
    def key(self) -> str:
        return f"{self.start.isoformat()} +{self.later_by} -{self.earlier_by}"

    @property
    def end(self) -> date:
        return self.start + timedelta(days=self.later_by - self.earlier_by)

    @property
    def answer(self) -> str:
        return f"{WEEKDAYS[self.end.weekday()]}, {_spell(self.end)}"

    def question(self, say: Phraser) -> str:
        opening = say.sentence(
            "the {event} [of|for|with] {name} [is|was set|is planned|was to be] on {weekday}, {day} {year}",
            event=self.event,
            weekday=WEEKDAYS[self.start.weekday()],
            day=_spell(self.start),
            year=self.start.year,
        )
        later = say.sentence("[{friend} moves it|it moves|it is put off] {n} days [later|forward]", n=self.later_by)
        earlier = say.sentence("then [it moves|{name} moves it|it is put] {n} days [earlier|back]", n=self.earlier_by)
        return " ".join([opening, later, earlier, "On what weekday and date is it?"])

    def steps(self, say: Phraser) -> list[str]:
        shift = self.later_by - self.earlier_by
        net = say.sentence(
            "{so} {later} days [forth|on|later|ahead] [and|but|then|less] {earlier} [back|earlier] {makes} "
            "{shift}[| days]",
            later=self.later_by,
            earlier=self.earlier_by,
            shift=shift,
        )
        weeks, days = divmod(shift, 7)
        weekday = say.sentence(
            "{so} {shift} {is} {weeks} weeks [and|with|plus] {days}[| days| more], [so|and|thus|hence] "
            "[from|after|with|past] {start} "
            "[{that} {makes}|we {have}|it falls on|we get to|it must be] {end}[|, {check}]",
            shift=shift,
            weeks=weeks,
            days=days,
            start=WEEKDAYS[self.start.weekday()],
            end=WEEKDAYS[self.end.weekday()],
        )
        day = self._count_days(say)
        later_steps = [weekday, day]
        say.random.shuffle(later_steps)
        return [net, *later_steps]

    def _count_days(self, say: Phraser) -> str:
        """Return the step that adds the shift to the day of the month, and then subtracts the length of each month that
        it passes."""
        shift = (self.end - self.start).days
        year, month, day = self.start.year, self.start.month, self.start.day + shift
        told = say.say(
            "{so} [from|after|with|past] {start}, {before} {add} {shift} {makes} {day}",
            start=_spell(self.start),
            before=self.start.day,
            shift=shift,
            day=day,
        )
        while day > (length := monthrange(year, month)[1]):
            day -= length
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
            told += say.say(", {drop} {length} {makes} {day}", length=length, day=day)
        return say.sentence("{told}, [so|and|thus|hence|that is] {end}[|, {check}]", told=told, end=_spell(self.end))


def draw_dates(random: Random, difficulty: Difficulty) -> DatesTask:
    """Draw an event, its first date, and how far it is moved."""
    knobs = difficulty.dates
    day_of_year = timedelta(days=draw_between(random, (0, 364)))
    start = date(draw_between(random, knobs.years), 1, 1) + day_of_year
    return DatesTask(
        random.choice(EVENTS), start, draw_between(random, knobs.later_by), draw_between(random, knobs.earlier_by)
    )
