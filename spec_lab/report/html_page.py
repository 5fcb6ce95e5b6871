"""A self-contained HTML page: sortable tables, and figures whose data can be unfolded. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_lab.record.wording import in_html

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The content security policy, which keeps the page from fetching anything."""
STYLE = """\
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ccc}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;margin:.5em 0}
th,td{padding:.2em .6em;text-align:right;border-bottom:1px solid #e4e4e4;white-space:nowrap}
th{cursor:pointer;background:#f4f4f4;position:sticky;top:0}th[data-way]::after{content:" \\2191"}
th[data-way="-1"]::after{content:" \\2193"}td.text,th.text{text-align:left}
figure{margin:1em 0}figure svg{max-width:100%;height:auto}p.note{color:#555;max-width:60em}
pre{background:#f4f4f4;padding:.6em;overflow-x:auto}dt{font-family:monospace;margin-top:.6em}dd{margin-left:2em;max-width:60em}
nav a{margin-right:1em}"""
SCRIPT = """\
function value(cell) {
  const text = cell.textContent.trim(), found = text.replace(/,/g, "").match(/^[+-]?\\d+(\\.\\d+)?/);
  return found ? Number(found[0]) : text;
}
function order(a, b) {
  const numbers = [a, b].map(one => typeof one === "number");
  if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
  return numbers[0] ? a - b : a.localeCompare(b);
}
document.addEventListener("click", event => {
  const head = event.target.closest("th");
  if (!head) return;
  const table = head.closest("table"), body = table.tBodies[0];
  const place = [...head.parentNode.children].indexOf(head), way = head.dataset.way === "1" ? -1 : 1;
  table.querySelectorAll("th").forEach(one => delete one.dataset.way);
  head.dataset.way = way;
  const rows = [...body.rows].map(row => [value(row.cells[place]), row]);
  rows.sort((a, b) => way * order(a[0], b[0])).forEach(pair => body.append(pair[1]));
});"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page with its own heading; `content` is HTML."""

    name: str
    content: str


def page_of(title: str, under: str, parts: Sequence[Part]) -> str:
    """Return the page: a title, the line `under` it, links to the parts, and the parts."""
    links = " ".join(f'<a href="#part{number}">{in_html(part.name)}</a>' for number, part in enumerate(parts))
    body = "\n".join(
        f'<h2 id="part{number}">{in_html(part.name)}</h2>\n{part.content}' for number, part in enumerate(parts)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{in_html(title)}</title><style>{STYLE}</style></head>\n<body><h1>{in_html(title)}</h1>"
        f"<p>{in_html(under)}</p><nav>{links}</nav>\n{body}\n<script>{SCRIPT}</script></body></html>\n"
    )


def table(header: Sequence[str], body: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Return a table that sorts by the column whose header is clicked; columns named in `left` hold text."""
    kinds = [' class="text"' if name in left else "" for name in header]
    heads = "".join(f"<th{kind}>{in_html(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{kind}>{in_html(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>\n"
        for row in body
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def note(text: str) -> str:
    """Return an explanatory paragraph."""
    return f'<p class="note">{in_html(text)}</p>'


def folded(title: str, content: str) -> str:
    """Return content that is hidden until its title is clicked."""
    return f"<details><summary>{in_html(title)}</summary>{content}</details>"


def code(text: str) -> str:
    """Return preformatted lines of code."""
    return f"<pre>{in_html(text)}</pre>"


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a list of names with their meanings."""
    return f"<dl>{''.join(f'<dt>{in_html(name)}</dt><dd>{in_html(text)}</dd>' for name, text in pairs)}</dl>"
