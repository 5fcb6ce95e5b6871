"""How a model's chat template writes a conversation, found once: the texts that stand around its turns.

A template is a program, and rendering a prompt by it starts a process. A training needs some 100,000 prompts, so it is
rendered once for each number of turns, with marks in place of what is said, and prompts are put together of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_lab.core.errors import UserError
from spec_lab.workloads.tokenizer import TargetTokenizer

MARK = "QZXJ"
SAMPLE = ("How tall is it?", "It is 12 m tall.", "And how wide, in feet?")


@dataclass(slots=True)
class ChatForm:
    """Writes conversations as a model's chat template does."""

    tokenizer: TargetTokenizer
    _parts: dict[tuple[int, str | None], list[str]] = field(default_factory=dict)

    def refuse_unless_usable(self, begins_turns: bool) -> None:
        """Raise UserError for a template that no texts can be written by; `begins_turns`: the user's, too."""
        self.parts(1)
        if begins_turns:
            self.end_of_turn()

    def text(self, turns: Sequence[str], system: str | None = None) -> str:
        """Return a conversation, the user's turns first and last, up to where the assistant's next turn begins."""
        parts = self.parts(len(turns), system)
        said = [turn.strip() for turn in turns]
        return parts[0] + "".join(turn + part for turn, part in zip(said, parts[1:], strict=True))

    def next_turn(self, turns: Sequence[str], system: str | None = None) -> str:
        """Return what stands before the user's next turn, behind `turns` that end with the assistant's or are none."""
        parts = self.parts(len(turns) + 1, system)
        return "".join(part + turn for part, turn in zip(parts, [*(turn.strip() for turn in turns), ""], strict=False))

    def end_of_turn(self) -> str:
        """Return what the template puts behind a user's turn: the first line of it.

        Raises:
            UserError: there is no such thing, and so nothing that a user's turn would be known by.
        """
        end = self.parts(1)[-1].strip().partition("\n")[0].strip()
        if not end:
            raise UserError(
                "prompts=[]: the target has no chat template with a user's turn, so it cannot write prompts of its "
                "own; give some with prompts=[FILE.jsonl]"
            )
        return end

    def parts(self, num_turns: int, system: str | None = None) -> list[str]:
        """Return the `num_turns + 1` texts around so many turns.

        Raises:
            UserError: the template leaves a turn out, or writes turns in a way that does not come apart.
        """
        key = num_turns, system
        if key not in self._parts:
            marks = [f"{MARK}{number}{MARK}" for number in range(num_turns)]
            parts, rest = [], self.tokenizer.decode(self.tokenizer.encode_conversation(marks, system))
            for mark in marks:
                before, found, rest = rest.partition(mark)
                if not found:
                    raise UserError("the target's chat template leaves out a turn of a conversation; mend it")
                parts.append(before)
            self._parts[key] = [*parts, rest]
            self._check(num_turns, system)
        return self._parts[key]

    def _check(self, num_turns: int, system: str | None) -> None:
        """Refuse a template whose parts are not what it writes around other words."""
        turns = [SAMPLE[number % len(SAMPLE)] for number in range(num_turns)]
        if self.tokenizer.encode(self.text(turns, system)) != self.tokenizer.encode_conversation(turns, system):
            raise UserError("the target's chat template changes what is said in a conversation; mend it")
