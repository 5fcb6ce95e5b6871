"""The scene of a chat prompt: facts, some of which the prompt states, in any order. The thinking may use them all."""

from __future__ import annotations

from random import Random

from spec_lab.corpus.phrasing import Phraser

NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
    "Wendy",
    "Hugo",
    "Lucy",
    "Mark",
    "Nina",
    "Oscar",
    "Peter",
    "Ruth",
    "Simon",
    "Vera",
]
_FACTS: dict[str, tuple[str, ...]] = {
    "place": ("Rome", "Paris", "Cairo", "Lima", "Oslo", "Delhi", "Bern", "Kyoto", "Boston", "Quito", "Dublin", "Malta"),
    "mood": ("happy", "tired", "calm", "sad", "proud", "angry", "bored", "shy", "glad", "nervous", "hungry", "merry"),
    "drink": ("tea", "milk", "juice", "water", "coffee", "soup", "wine", "cider", "cocoa", "beer"),
    "pet": ("cat", "dog", "goat", "horse", "parrot", "rabbit", "duck", "snake", "turtle", "mouse", "crow", "pig"),
    "weather": ("rain", "snow", "sun", "fog", "wind", "frost", "storm", "hail", "heat", "ice", "mist", "thunder"),
    "item": ("door", "lamp", "table", "cup", "clock", "boat", "stone", "tree", "bell", "coat", "song", "train", "key"),
    "other_item": ("road", "river", "window", "bag", "wall", "letter", "garden", "box", "chair", "map", "book", "hat"),
    "look": ("grey", "new", "small", "big", "red", "cold", "warm", "quiet", "round", "long", "dark", "clean", "plain"),
    "other_look": ("pale", "soft", "wet", "dry", "blue", "fast", "slow", "flat", "high", "low", "green", "thin"),
    "label": ("total", "count", "stock", "sum", "heap", "score", "load", "pile", "tally", "store", "mark", "level"),
}
_POSSESSIONS = (
    "[{name} has|there is|we see|{friend} gets] a {look} {item} [and|with|near|by] a {other_look} {other_item}"
)
_STATEMENTS = (
    "{name} [lives|works|stays|is] in {place}",
    "{name} is {mood}[| today| again]",
    "{friend} [likes|drinks|wants|buys] {drink}",
    "[a {pet} is there|they have a {pet}|a {pet} sleeps near|{friend} has a {pet}]",
    "[there is {weather}|it is a day of {weather}|{weather} is near]",
)


def draw_facts(random: Random) -> dict[str, str]:
    """Draw the facts: two different names, and a value for each other kind of fact."""
    name, friend = random.sample(NAMES, 2)
    facts = {kind: values[int(random.random() * len(values))] for kind, values in _FACTS.items()}
    return {"name": name, "friend": friend, **facts}


def opening_sentences(say: Phraser, num_statements: int) -> list[str]:
    """Return sentences for the prompt: the scene's items, and then `num_statements` random other facts."""
    return [say.sentence(statement) for statement in (_POSSESSIONS, *say.random.sample(_STATEMENTS, num_statements))]
