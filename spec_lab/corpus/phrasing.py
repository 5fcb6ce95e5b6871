"""A small language of templates, each of which has many wordings.

`[a|b|c]` stands for one of its alternatives, drawn with equal probability. Alternatives may be nested, or empty.
`{slot}` stands for a value given with the call, else for one of the phraser's facts, else for a rule of the grammar.
The rule is expanded in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random


@dataclass(frozen=True, slots=True)
class Slot:
    """`{name}`, which is filled in when the template is used."""

    name: str


@dataclass(frozen=True, slots=True)
class Alternatives:
    """`[a|b]`, of which one alternative is drawn when the template is used."""

    alternatives: tuple[Sequence, ...]


Node = str | Slot | Alternatives
Sequence = tuple[Node, ...]


@cache
def parse(template: str) -> Sequence:
    """Parse the template as literals, slots and alternatives. Raises ValueError for unbalanced brackets."""
    sequence, end = _parse_sequence(template, 0)
    if end != len(template):
        raise ValueError(f"unbalanced ']' or '|' at {end} in template {template!r}")
    return sequence


def _parse_sequence(template: str, start: int) -> tuple[Sequence, int]:
    """Parse nodes from `start` to the end, or to the `|` or `]` that closes their alternative."""
    nodes: list[Node] = []
    position = start
    while position < len(template) and template[position] not in "|]":
        if template[position] == "[":
            choice, position = _parse_choice(template, position + 1)
            nodes.append(choice)
        elif template[position] == "{":
            end = template.index("}", position)
            nodes.append(Slot(template[position + 1 : end]))
            position = end + 1
        else:
            end = position
            while end < len(template) and template[end] not in "[]{|":
                end += 1
            nodes.append(template[position:end])
            position = end
    return tuple(nodes), position


def _parse_choice(template: str, start: int) -> tuple[Alternatives, int]:
    alternatives = []
    position = start
    while True:
        sequence, position = _parse_sequence(template, position)
        alternatives.append(sequence)
        if position == len(template):
            raise ValueError(f"'[' without ']' in template {template!r}")
        position += 1
        if template[position - 1] == "]":
            return Alternatives(tuple(alternatives)), position


def compile_rules(rules: Mapping[str, str]) -> dict[str, Alternatives]:
    """Make the rules of a grammar from `name: "first | second"`. Blanks around an alternative are ignored."""
    compiled = {}
    for name, alternatives in rules.items():
        parts = [part.strip() for part in _split_alternatives(alternatives)]
        compiled[name] = Alternatives(tuple(parse(part) for part in parts))
    return compiled


def _split_alternatives(text: str) -> list[str]:
    """Split the text at bars outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


class Phraser:
    """Turns templates into text: draws the wording with `random`, and fills slots from `facts` and the grammar."""

    __slots__ = ("facts", "random", "rules")

    def __init__(self, random: Random, rules: Mapping[str, Alternatives], facts: Mapping[str, str]) -> None:
        self.random = random
        self.rules = rules
        self.facts = facts

    def say(self, template: str, **values: object) -> str:
        """Return one wording of `template`. Raises KeyError for a slot that is in neither values, facts nor rules."""
        words: list[str] = []
        self._write(parse(template), values, words)
        return "".join(words)

    def sentence(self, template: str, **values: object) -> str:
        """Return one wording of `template` as a sentence, with a capital letter and a full stop."""
        text = self.say(template, **values).strip()
        return f"{text[:1].upper()}{text[1:]}."

    def _write(self, sequence: Sequence, values: Mapping[str, object], words: list[str]) -> None:
        for node in sequence:
            if isinstance(node, Slot):
                if node.name in values:
                    words.append(str(values[node.name]))
                    continue
                if node.name in self.facts:
                    words.append(self.facts[node.name])
                    continue
                node = self.rules[node.name]
            if isinstance(node, str):
                words.append(node)
                continue
            # `random.choice` costs four times as much, and this line runs a hundred times an example.
            alternative = node.alternatives[int(self.random.random() * len(node.alternatives))]
            self._write(alternative, values, words)
