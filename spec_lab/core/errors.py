"""The errors that a user can mend, and how errors are described in a line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path


class UserError(ValueError):
    """A request of the user cannot be carried out. The message names the knob or the file, and the remedy.

    The command line prints it in one line and exits with code 2. Any other exception gets a traceback.
    """


class Breakdown(ArithmeticError):
    """A computation cannot continue, for instance since its numbers are no longer finite. It is not our mistake.

    The message says where it happened and what helps. It is printed in one line, with exit code 1.
    """


QUOTED_PATH = re.compile(r"(?P<before>['\"])/[^'\"\n]*/(?P<name>[^'\"/\n]+)(?=['\"])")
BARE_PATH = re.compile(r"(?P<before>(?<![\w./:~-]))/(?:[^\s/'\",:;()\[\]]+/)+(?P<name>[^\s/'\",:;()\[\]]*)")


def describe_error(error: BaseException) -> str:
    """Return the class of an exception with its message; without a message, the place where it was raised.

    Records contain this text, and other people may read them. So paths are cut to their last part.
    """
    kind, message = type(error).__name__, without_folders(str(error).strip())
    if message:
        return f"{kind}: {message}"
    places = traceback.extract_tb(error.__traceback__) if isinstance(error, Exception) else []
    return f"{kind} at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else kind


def visible(text: str, keep: str = "") -> str:
    r"""Return text from outside with control characters, which would affect a terminal or a page, escaped like `\x1b`.

    Args:
        keep: characters that are not escaped, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def without_folders(text: str) -> str:
    """Return `text` with the absolute paths in it cut to their last part."""
    for pattern in (QUOTED_PATH, BARE_PATH):
        text = pattern.sub(r"\g<before>\g<name>", text)
    return text
