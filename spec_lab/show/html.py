"""One request as HTML: a fragment for notebooks, or a whole page. Everything recorded is escaped."""

from __future__ import annotations

from spec_lab.record.wording import in_html
from spec_lab.show.looks import LOOKS, OriginLook, counts
from spec_lab.show.rounds import ShownRequest, Token

CELL = "padding:1px 8px;vertical-align:top;white-space:nowrap;color:#555;text-align:left"
TOKENS = "padding:1px 0;text-align:left;font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere"


def page(request: ShownRequest) -> str:
    """Write a whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{in_html(request.row['id'])}</title></head>\n<body>{fragment(request)}</body></html>\n"
    )


def fragment(request: ShownRequest) -> str:
    """Write the heading, a legend with counts, and a row for each round. Styles are in the elements, since notebooks
    remove others."""
    legend = " ".join(f"{_mark(look, look.word)} {count}" for look, count in counts(request.tokens))
    rows = "".join(
        f'<tr><td style="{CELL}">{in_html(request.describe_round(part))}</td>'
        f'<td style="{TOKENS}">{"".join(map(_token, part.tokens))}</td></tr>\n'
        for part in request.rounds
    )
    text = ""
    if any(token.text is None for token in request.tokens):
        text = f'<pre style="white-space:pre-wrap">{in_html(request.row["text"])}</pre>'
    return f"<div><p>{in_html(request.heading)}</p><p>{legend}</p>\n<table>{rows}</table>{text}</div>"


def _token(token: Token) -> str:
    return _mark(LOOKS[token.origin], token.shown, f"{token.token_id}, {LOOKS[token.origin].word}")


def _mark(look: OriginLook, text: str, title: str = "") -> str:
    about = f' title="{in_html(title)}"' if title else ""
    style = f"background:{look.background};color:#000;border-radius:2px;margin-right:1px"
    return f'<span style="{style}"{about}>{in_html(text)}</span>'
