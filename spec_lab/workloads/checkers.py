r"""The values of `workload.checker`: they read the answer in a model's reply, and compare two answers.

They get the reply without the thinking and the end of the turn, which `workloads/checker.py` removes. The answer that
was read is recorded in `requests.jsonl`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import ClassVar

from spec_lab.config.option import option

LINE = re.compile(r"answer\s*(?:is\b)?\W{0,3}:[ \t]*(?P<answer>[^\n]*)", re.IGNORECASE)
"""`Answer: 42`, `**Answer:** 42`, `The answer is: 42`."""
NUMBER = re.compile(r"(?<![\w.])[-\u2212+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}\b)?")
LETTER = r"(?P<letter>[B-HJ]\b(?!['\u2019])|[AI]\b(?!['\u2019]|\s+(?!because|since|as\b)[a-z]))"
"""The letter of a choice. A and I need more care, since they are also words."""
CHOICE = re.compile(rf"\b(?i:answer|option|choice)\s*(?i:is|:)?\W{{0,6}}{LETTER}")
ALONE = re.compile(r"^\W*(?P<letter>[A-J])(?:\W*$|[).:])", re.MULTILINE)
BOXES = ("\\boxed", "\\fbox")
DECORATION = "*_`$ \t"
TEX_WORDS = re.compile(r"\\(?:left|right|displaystyle|!|,|;|:|quad)(?![a-z])|\\(?:text|mathrm|textbf)\s*(?=\{)|[\s$]")


class Checker:
    """The base of the values of `workload.checker`. They have no state, so the class itself is used."""

    name: ClassVar[str]

    @staticmethod
    def read(reply: str) -> str | None:
        """Return the answer in a reply without its thinking; None if there is none."""
        raise NotImplementedError

    @staticmethod
    def same(expected: str, answer: str) -> bool:
        """Return whether an answer that was read is the expected one."""
        raise NotImplementedError

    @staticmethod
    def expects(expected: str) -> bool:
        """Return whether `read` can return an expected answer at all."""
        return bool(expected.strip())


@option("workload.checker", "answer")
class AnswerLine(Checker):
    """The text behind `Answer:`."""

    @staticmethod
    def read(reply: str) -> str | None:
        """Return the normalised rest of the line after the last `Answer:`; None if it is empty or there is none."""
        found = list(LINE.finditer(reply))
        return _normalised(found[-1]["answer"]) or None if found else None

    @staticmethod
    def same(expected: str, answer: str) -> bool:
        return _normalised(expected) == _normalised(answer)


@option("workload.checker", "last_number")
class LastNumber(Checker):
    """The last number of the reply."""

    @staticmethod
    def read(reply: str) -> str | None:
        """Return the last number, without separators of thousands."""
        found = [match.group() for match in NUMBER.finditer(reply)]
        return found[-1].replace(",", "").replace("\u2212", "-").removeprefix("+") if found else None

    @staticmethod
    def same(expected: str, answer: str) -> bool:
        """Compare by value, so that 42 equals 42.0. The expected answer may be a text that ends with a number, such as
        `#### 42`."""
        known, given = LastNumber.read(expected), LastNumber.read(answer)
        return known is not None and given is not None and Decimal(known) == Decimal(given)

    @staticmethod
    def expects(expected: str) -> bool:
        return LastNumber.read(expected) is not None


@option("workload.checker", "boxed")
class Boxed(Checker):
    """The formula in the last box of LaTeX."""

    @staticmethod
    def read(reply: str) -> str | None:
        r"""Return the contents of the last `\boxed{}` or `\fbox{}`, whose braces may be nested."""
        start = max(reply.rfind(box) for box in BOXES)
        opening = reply.find("{", start) if start >= 0 else -1
        depth = 0
        for place in range(opening, len(reply)) if opening >= 0 else ():
            depth += {"{": 1, "}": -1}.get(reply[place], 0)
            if depth == 0:
                return reply[opening + 1 : place].strip() or None
        return None

    @staticmethod
    def same(expected: str, answer: str) -> bool:
        """Compare without TeX's spaces and sizes, and by value if both are numbers."""
        known, given = (_plain_tex(Boxed.read(text) or text) for text in (expected, answer))
        both_numbers = all(NUMBER.fullmatch(text) for text in (known, given))
        return known == given or (both_numbers and LastNumber.same(known, given))

    @staticmethod
    def expects(expected: str) -> bool:
        """A formula in a box has as many closing braces as opening ones."""
        return bool(expected.strip()) and expected.count("{") == expected.count("}")


@option("workload.checker", "choice")
class ChoiceLetter(Checker):
    """The letter of a choice."""

    @staticmethod
    def read(reply: str) -> str | None:
        """Return the letter in a box, else the last one after `answer`, `option` or `choice`.

        If there is none, take the last one that begins a line, and is alone in it or before `)`, `.` or `:`.
        """
        boxed = Boxed.read(reply)
        if boxed is not None and len(letter := boxed.strip("() .").removeprefix("\\text{").rstrip("}")) == 1:
            return letter.upper()
        found = list(CHOICE.finditer(reply)) or list(ALONE.finditer(reply))
        return found[-1]["letter"].upper() if found else None

    @staticmethod
    def same(expected: str, answer: str) -> bool:
        return _letter(expected) == answer

    @staticmethod
    def expects(expected: str) -> bool:
        return _letter(expected) is not None


@option("workload.checker", "exact")
class Exact(Checker):
    """The whole reply, without white space around it."""

    @staticmethod
    def read(reply: str) -> str | None:
        return reply.strip() or None

    @staticmethod
    def same(expected: str, answer: str) -> bool:
        return expected.strip() == answer.strip()


def _normalised(answer: str) -> str:
    """Remove differences that do not matter: case, white space, emphasis around the answer, and a final full stop."""
    return " ".join(answer.split()).strip(DECORATION).rstrip(".").rstrip(DECORATION).lower()


def _letter(expected: str) -> str | None:
    known = expected.strip("() .")
    return known.upper() if len(known) == 1 and known.isalpha() else ChoiceLetter.read(expected)


def _plain_tex(text: str) -> str:
    plain = TEX_WORDS.sub("", text).replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".")
    return plain[1:-1] if plain.startswith("{") and plain.endswith("}") and plain.count("{") == 1 else plain
