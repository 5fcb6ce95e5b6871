"""The documentation as a site: what lies outside docs/ is in it, and links lead where they lead in the repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="the documentation's tools are not installed")

from mkdocs.config import load_config
from mkdocs.structure.files import Files, get_files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages() -> Any:
    """The hook; a module of no package."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config() -> Any:
    """That of the site without what takes long to load; mkdocs sets the name while it calls a hook."""
    loaded = load_config(str(ROOT / "mkdocs.yml"), plugins=[], hooks=[], theme={"name": "mkdocs"})
    loaded.plugins._current_plugin = "site_pages"
    return loaded


@pytest.fixture
def files(pages: Any, config: Any) -> Files:
    return pages.on_files(get_files(config), config)


def rendered(uri: str, markdown: str, pages: Any, config: Any, files: Files) -> str:
    """The Markdown of a page of the site as the hook hands it on."""
    file = files.get_file_from_path(uri)
    assert file is not None
    return pages.on_page_markdown(markdown, Page(None, file, config), config, files)


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("index.md", "docs/extend.md", "extend.md"),
        ("index.md", "docs/report.png", "report.png"),
        ("index.md", "kernels/README.md", "kernels.md"),
        ("index.md", "spec_lab/engine/round.py", "repository/spec_lab/engine/round.py"),
        ("use.md", "../sweeps/drafter_grid.yaml", "repository/sweeps/drafter_grid.yaml"),
        ("use.md", "extend.md#the-rows", "extend.md#the-rows"),
        ("api/options.md", "../extend.md", "../extend.md"),
        ("zoo/pocket.md", "../../workloads/load.py", "../repository/spec_lab/workloads/load.py"),
        ("kernels.md", "../README.md", "index.md"),
        ("index.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("index.md", "#figures", "#figures"),
    ],
)
def test_a_link_leads_to_the_same_thing_as_in_the_repository(
    uri: str, link: str, expected: str, pages: Any, config: Any, files: Files
) -> None:
    assert rendered(uri, f"[text]({link})", pages, config, files) == f"[text]({expected})"


def test_a_file_that_is_no_page_is_copied_once(pages: Any, config: Any, files: Files) -> None:
    link = "[a](../sweeps/drafter_grid.yaml)"
    rendered("use.md", f"{link} {link}", pages, config, files)
    [copied] = [file for file in files if file.src_uri == "repository/sweeps/drafter_grid.yaml"]
    assert copied.content_string == (ROOT / "sweeps" / "drafter_grid.yaml").read_text()


def test_code_is_left_as_it_is(pages: Any, config: Any, files: Files) -> None:
    code = "```\n[text](docs/extend.md)\na\n- b\n```"
    assert rendered("index.md", code, pages, config, files) == code


def test_a_list_right_below_a_paragraph_becomes_one(pages: Any, config: Any, files: Files) -> None:
    assert rendered("index.md", "a\n- b\n- c\n  d\n- e", pages, config, files) == "a\n\n- b\n- c\n  d\n- e"


def test_every_page_is_in_the_navigation(pages: Any, config: Any, files: Files) -> None:
    named = pages.named_in(config.nav)
    assert {page.src_uri for page in files.documentation_pages()} == named
    assert "zoo/pocket.md" in named and "index.md" in named
