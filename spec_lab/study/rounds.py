"""The rounds of one request, with each token's text and origin: for a terminal, or as HTML for a notebook.

from IPython.display import HTML
HTML(request_html("outputs/RUN", "code-3"))
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, TextIO

import pandas as pd

from spec_lab.core.errors import UserError, visible
from spec_lab.core.origins import TokenOrigin
from spec_lab.record.models import Request
from spec_lab.record.reading import read_requests
from spec_lab.study.tables import paragraph

WIDTH = 100


class Look(NamedTuple):
    """How tokens of one origin look: a mark for terminals without colours, else an escape sequence; in HTML a
    background."""

    word: str
    mark: str
    ansi: str
    background: str


LOOKS: dict[str | None, Look] = {
    TokenOrigin.PROMPT_PASS: Look("prompt pass", "^", "30;47", "#dddddd"),
    TokenOrigin.ACCEPTED: Look("accepted", "+", "30;42", "#a8e0b0"),
    TokenOrigin.RELAXED: Look("relaxed", "~", "30;43", "#ffe08a"),
    TokenOrigin.CORRECTED: Look("corrected", "!", "97;41", "#f5a9a0"),
    TokenOrigin.BONUS: Look("bonus", "*", "30;46", "#a5cdf5"),
    None: Look("unknown", "?", "0", "#ffffff"),
}


@dataclass(frozen=True, slots=True)
class Token:
    """One output token; `text` is what it added to the output, empty if a later token completes its character."""

    token_id: int
    text: str
    look: Look


@dataclass(frozen=True, slots=True)
class ShownRound:
    """The tokens that one round emitted; the first is the prompt pass."""

    title: str
    tokens: list[Token]


def load_request(folder: Path | str, request_id: str) -> Request:
    """Read one request of a run.

    Raises:
        UserError: there is no such run or request.
    """
    requests = {request.id: request for request in read_requests(folder)}
    if request_id not in requests:
        near = difflib.get_close_matches(request_id, list(requests), n=3) or list(requests)[:3]
        raise UserError(f"{folder}: no request {request_id!r}; it has {len(requests)}, such as {', '.join(near)}")
    return requests[request_id]


def list_requests(folder: Path | str) -> pd.DataFrame:
    """Return a row for each request of a run: its category, tokens and rounds."""
    rows = [
        {
            "id": request.id,
            "category": request.category,
            "output tokens": len(request.output_ids),
            "rounds": len(request.emitted_per_round or ()),
            "tokens a round": round(sum(request.emitted_per_round) / len(request.emitted_per_round), 2)
            if request.emitted_per_round
            else None,
            "ended by": request.finish_reason,
        }
        for request in read_requests(folder)
    ]
    return pd.DataFrame(rows)


def rounds_of_request(request: Request) -> Iterator[ShownRound]:
    """Cut a request into its rounds; all tokens are one round if its engine does not tell them."""
    tokens = list(_tokens(request))
    if request.emitted_per_round is None or request.accepted_per_round is None:
        yield ShownRound("all tokens (the engine tells no rounds)", tokens)
        return
    yield ShownRound("prompt pass", tokens[:1])
    at, offered = 1, request.offered_per_round or repeat(None, len(request.emitted_per_round))
    counts = zip(request.accepted_per_round, offered, request.emitted_per_round, strict=True)
    for number, (num_accepted, num_offered, num_emitted) in enumerate(counts, start=1):
        of = "" if num_offered is None else f" of {num_offered}"
        cut = ", cut" if num_emitted < num_accepted + 1 else ""
        yield ShownRound(f"round {number}: {num_accepted}{of}{cut}", tokens[at : at + num_emitted])
        at += num_emitted


def format_request(request: Request, colour: bool) -> str:
    """Write a request for a terminal: a heading, what colours or marks mean, and its rounds."""
    paint = _in_colour if colour else _behind_a_mark
    counts = Counter(token.look for token in _tokens(request))
    legend = "  ".join(f"{paint(look, look.word)} {count}" for look, count in counts.items())
    lines = [paragraph(_heading(request)), legend, ""]
    for part in rounds_of_request(request):
        lines += [part.title, *_wrapped(part.tokens, paint)]
    return "\n".join(lines)


def request_html(run: str | os.PathLike[str], request_id: str) -> str:
    """Write a fragment that shows one request of the run in the folder `run`. Styles are in the elements, since
    notebooks remove others."""
    request = load_request(Path(run), request_id)
    counts = Counter(token.look for token in _tokens(request))
    legend = " ".join(f"{_marked(look, look.word)} {count}" for look, count in counts.items())
    rows = "".join(
        f'<tr><td style="padding:1px 8px;vertical-align:top;white-space:nowrap;color:#555">{escape(part.title)}</td>'
        f'<td style="font-family:monospace;white-space:pre-wrap">{"".join(map(_token_html, part.tokens))}'
        "</td></tr>\n"
        for part in rounds_of_request(request)
    )
    return f"<div><p>{escape(_heading(request))}</p><p>{legend}</p>\n<table>{rows}</table></div>"


def wants_colour(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours, and NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _heading(request: Request) -> str:
    emitted = request.emitted_per_round
    rounds = f" in {len(emitted)} rounds, {sum(emitted) / len(emitted):.2f} tokens a round" if emitted else ""
    return (
        f"{request.id} ({request.category}): {len(request.prompt_ids)} prompt tokens, {len(request.output_ids)} output "
        f"tokens{rounds}, ended by {request.finish_reason}"
    )


def _tokens(request: Request) -> Iterator[Token]:
    ends = request.text_ends
    starts = None if ends is None else [0, *ends[:-1]]
    for index, token_id in enumerate(request.output_ids):
        text = "" if ends is None or starts is None else request.text[starts[index] : ends[index]]
        origin = None if request.token_origins is None else request.token_origins[index]
        yield Token(token_id, visible(text) or f"<{token_id}>", LOOKS[origin])


def _wrapped(tokens: list[Token], paint: Callable[[Look, str], str]) -> Iterator[str]:
    """Yield lines of whole tokens."""
    line, used = "  ", 0
    for token in tokens:
        length = len(_behind_a_mark(token.look, token.text))
        if used and used + length > WIDTH:
            yield line
            line, used = "  ", 0
        line += paint(token.look, token.text)
        used += length
    if used:
        yield line


def _in_colour(look: Look, text: str) -> str:
    return f"\x1b[{look.ansi}m{text}\x1b[0m "


def _behind_a_mark(look: Look, text: str) -> str:
    return f"{look.mark}[{text}]"


def _token_html(token: Token) -> str:
    return _marked(token.look, token.text, f"{token.token_id}, {token.look.word}")


def _marked(look: Look, text: str, title: str = "") -> str:
    about = f' title="{escape(title)}"' if title else ""
    style = f"background:{look.background};color:#000;border-radius:2px;margin-right:1px"
    return f'<span style="{style}"{about}>{escape(text)}</span>'
