"""The form of conversations in a model's chat template: the texts around the turns, found once.

A template is a program, and each rendering starts a process. A training needs some 100,000 prompts. So each
number of turns and each system message is rendered with placeholders for the turns, and once more as a check. Prompts
are assembled from the parts.
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
    """Writes conversations in the form of a model's chat template."""

    tokenizer: TargetTokenizer
    _parts: dict[tuple[int, str | None], list[str]] = field(default_factory=dict)

    def refuse_unless_usable(self, begins_turns: bool) -> None:
        """Raise UserError for an unusable template; `begins_turns`: the user's turns must be recognisable too."""
        self.parts(1)
        if begins_turns:
            self.end_of_turn()

    def text(self, turns: Sequence[str], system: str | None = None) -> str:
        """Return a conversation up to the start of the assistant's next turn; its first and last turns are the
        user's."""
        parts = self.parts(len(turns), system)
        said = [turn.strip() for turn in turns]
        return parts[0] + "".join(turn + part for turn, part in zip(said, parts[1:], strict=True))

    def next_turn(self, turns: Sequence[str], system: str | None = None) -> str:
        """Return the text up to the user's next turn, after `turns`, which are empty or end with the assistant's."""
        parts = self.parts(len(turns) + 1, system)
        return "".join(part + turn for part, turn in zip(parts, [*(turn.strip() for turn in turns), ""], strict=False))

    def end_of_turn(self) -> str:
        """Return the first line that the template puts after a user's turn.

        Raises:
            UserError: there is none, so the end of a user's turn cannot be recognised.
        """
        end = self.parts(1)[-1].strip().partition("\n")[0].strip()
        if not end:
            raise UserError(
                "prompts=[]: the target has no chat template with a user's turn, so it cannot write its own prompts; "
                "give prompts with prompts=[FILE.jsonl]"
            )
        return end

    def parts(self, num_turns: int, system: str | None = None) -> list[str]:
        """Return the `num_turns + 1` texts around this number of turns.

        Raises:
            UserError: the template omits a turn, or writes turns in a way that cannot be separated.
        """
        key = num_turns, system
        if key not in self._parts:
            marks = [f"{MARK}{number}{MARK}" for number in range(num_turns)]
            parts, rest = [], self.tokenizer.decode(self.tokenizer.encode_conversation(marks, system))
            for mark in marks:
                before, found, rest = rest.partition(mark)
                if not found:
                    raise UserError("the target's chat template leaves out a turn of a conversation; correct it")
                parts.append(before)
            self._parts[key] = [*parts, rest]
            self._check(num_turns, system)
        return self._parts[key]

    def _check(self, num_turns: int, system: str | None) -> None:
        """Refuse a template whose parts depend on the contents of turns."""
        turns = [SAMPLE[number % len(SAMPLE)] for number in range(num_turns)]
        if self.tokenizer.encode(self.text(turns, system)) != self.tokenizer.encode_conversation(turns, system):
            raise UserError("the target's chat template changes the text of a conversation; correct it")
