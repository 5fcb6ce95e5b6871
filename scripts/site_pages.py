"""A hook of mkdocs (mkdocs.yml): pages of the site that lie outside docs/, and links between them and docs/.

On a page of the site every link to a file of the repository works as it does in the repository: it leads to another
page, or to a copy of the file. What `--help` prints of a program becomes a page too.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
COPIES = "repository/"
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)(?P<path>[^)#\s]+)(?=[)#])")
LIST_BELOW_TEXT = re.compile(r"^(?!- )(\S.*)\n(?=- )", flags=re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```)", flags=re.MULTILINE | re.DOTALL)
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "kernels/README.md": "kernels.md",
    "outputs/README.md": "outputs.md",
    **{
        card.relative_to(ROOT).as_posix(): f"zoo/{card.parent.name}.md"
        for card in sorted(ROOT.glob("spec_lab/zoo/*/README.md"))
    },
}
"""Says where each page from outside docs/ stands in the site."""
HELP = {"options.md": ("spec_lab", "Options of a run")}
"""Pages that are printed from the schema: by place in the site the program and the title."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and every page of docs/ that the navigation does not name at its end."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for uri, (program, title) in HELP.items():
        files.append(File.generated(config, uri, content=options_page(program, title)))
    named = named_in(config.nav)
    others = sorted(page.src_uri for page in files.documentation_pages() if page.src_uri not in named)
    cards = [uri for uri in others if uri.startswith("zoo/")]
    more = [uri for uri in others if uri not in cards]
    config.nav = [*(config.nav or []), *([{"More": more}] if more else []), {"Weights": [{"Cards": cards}]}]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site; a file that is no page is copied."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        uri = site_uri(target)
        if uri.startswith(COPIES) and (ROOT / target).is_file() and files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri))

    source = repository_path(page.file.src_uri)
    parts = FENCE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(link, _spaced(part)) for index, part in enumerate(parts))


def repository_path(uri: str) -> str:
    """Return the file of the repository that a page of the site comes from."""
    return next((path for path, page in PAGES.items() if page == uri), DOCS + uri)


def site_uri(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return PAGES.get(path) or (path.removeprefix(DOCS) if path.startswith(DOCS) else COPIES + path)


@cache
def options_page(program: str, title: str) -> str:
    """Return a page with the help of a program."""
    command = [sys.executable, "-m", program, "--help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return f"# {title}\n\nWhat `python -m {program} --help` prints.\n\n```\n{printed}```\n"


def _spaced(markdown: str) -> str:
    """Put an empty line before each list that begins right below a paragraph: mkdocs wants one where GitHub does
    not."""
    return LIST_BELOW_TEXT.sub(r"\1\n\n", markdown)


def named_in(nav: object) -> set[str]:
    """Return every page that a navigation names."""
    if isinstance(nav, str):
        return {nav}
    inside = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return {page for part in inside for page in named_in(part)}
