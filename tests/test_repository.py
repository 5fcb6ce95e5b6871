"""What the repository says about itself: its paths, its commands, and whose text it ships."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def documents() -> list[Path]:
    """Everything that a reader is sent to by a path."""
    named = (ROOT / name for name in (".", "docs", "docs/log", "outputs", "kernels"))
    folders = (*named, *(ROOT / "spec_lab/zoo").iterdir())
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def test_paths_in_documents_lead_somewhere() -> None:
    """A path in backticks starts at the root, a link beside the document; a name in capitals is the reader's own."""
    lost = []
    for document in documents():
        text = document.read_text()
        named = re.findall(r"`((?:spec_lab|kernels|tests|conf|docs|scripts|benchmarks|notebooks)/[a-z0-9_./-]+)`", text)
        linked = [document.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
        lost += [(document, path) for path in (*(ROOT / name for name in named), *linked) if not path.exists()]
    assert not lost


def test_notice_names_every_prompt_file_with_python_s_text() -> None:
    """All prompts of the natural categories, and those of others that quote the opening of a sentence."""
    notice = (ROOT / "NOTICE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice
    for path in (ROOT / "spec_lab/workloads/prompts").glob("*.jsonl"):
        quotes = path.stem in ("code", "prose") or re.search(r" (reads|says): [A-Z][a-z]+ .*?\.\.\.", path.read_text())
        assert (path.name in notice) == bool(quotes), path.name
