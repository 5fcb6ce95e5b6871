"""One request for a terminal, with coloured tokens, or with marks before tokens if there are no colours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from spec_lab.core.errors import visible
from spec_lab.report.table import paragraph, table_width
from spec_lab.show.looks import LOOKS, OriginLook, counts
from spec_lab.show.rounds import ShownRequest, Token

INDENT = "  "


def wants_colour(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `stream` is a terminal with colours, and NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def format_request(request: ShownRequest, colour: bool) -> str:
    """Write the heading, the meanings of the colours or marks with their counts, each round, and the whole text if
    tokens have no texts."""
    paint = _in_colour if colour else _behind_a_mark
    legend = "  ".join(f"{paint(look, look.word)} {count}" for look, count in counts(request.tokens))
    lines = [paragraph(request.heading), legend, ""]
    for part in request.rounds:
        lines += [request.describe_round(part), *_wrapped(part.tokens, paint)]
    if any(token.text is None for token in request.tokens):
        lines += ["", "text, which the record does not cut into tokens:", *_printable_lines(request.row["text"])]
    return "\n".join(lines)


def _wrapped(tokens: list[Token], paint: Callable[[OriginLook, str], str]) -> Iterator[str]:
    """Yield lines of whole tokens; one that is longer than a line is broken by the terminal."""
    room = table_width() - len(INDENT)
    line, used = "", 0
    for token in tokens:
        look = LOOKS[token.origin]
        length = len(_behind_a_mark(look, token.shown))
        if used and used + length > room:
            yield INDENT + line
            line, used = "", 0
        line += paint(look, token.shown)
        used += length
    if line:
        yield INDENT + line


def _in_colour(look: OriginLook, text: str) -> str:
    return f"\x1b[{look.ansi}m{text}\x1b[0m" + " "


def _behind_a_mark(look: OriginLook, text: str) -> str:
    return f"{look.mark}[{text}]"


def _printable_lines(text: str) -> Iterator[str]:
    """Yield the lines of the text, without control sequences."""
    for line in text.split("\n"):
        yield INDENT + visible(line)
