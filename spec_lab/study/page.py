"""One page with tables and figures that opens without a network: `page.html.j2`, filled."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_lab.record.reading import Found
from spec_lab.study.figures import Draw, svg
from spec_lab.study.tables import Table

TEMPLATE = Path(__file__).with_name("page.html.j2")
BESIDE_A_COMMAND = ("experiment", "size", "logger", "debug")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: a heading, tables, and figures that are drawn when the page is made."""

    title: str
    tables: Sequence[Table] = ()
    figures: Mapping[str, Draw] | None = None
    text: str = ""


def page_of(
    title: str, under: str, sections: Iterable[Section], runs: Sequence[Found], notes: Mapping[str, str]
) -> str:
    """Return the page.

    Args:
        under: the line below the title.
        notes: definitions by name.
    """
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    parts = [
        {
            "title": section.title,
            "text": section.text,
            "tables": [{"title": t.title, "html": t.html(), "note": t.caption} for t in section.tables],
            "figures": {name: svg(draw()) for name, draw in (section.figures or {}).items()},
        }
        for section in sections
    ]
    commands = [command_of(found) for found in runs]
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=title, under=under, sections=parts, commands=commands, definitions=notes)


def command_of(found: Found) -> str:
    """Return a command that repeats a run: Hydra's own list of what was typed, else the choices of the record."""
    from omegaconf import OmegaConf

    typed = found.folder / ".hydra" / "overrides.yaml"
    if typed.exists():
        overrides = list(map(str, OmegaConf.load(typed)))
    else:
        overrides = [f"{group}={name}" for group, name in found.run.choices.items() if group not in BESIDE_A_COMMAND]
    return shlex.join(["python", "-m", "spec_lab", *overrides])
