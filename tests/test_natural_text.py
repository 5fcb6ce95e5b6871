"""The prose of the standard library, against a walk through all of its syntax."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from spec_lab.corpus.natural import prose_documents
from spec_lab.corpus.split import FILES_PER_EVAL_FILE, split_of
from tests.few_sources import NAMED


def plain_share(text: str) -> float:
    return sum(character.isalpha() or character == " " for character in text) / len(text)


@pytest.mark.parametrize("name", NAMED)
def test_docstrings_stand_in_the_order_of_a_walk_those_inside_statements_too(name: str) -> None:
    """Such as under `if`, `else` and `except`."""
    tree = ast.parse((Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]
    prose = [text for text in texts if len(text) > 60 and plain_share(text) > 0.85]
    documents = prose_documents(split_of(name, FILES_PER_EVAL_FILE))
    (document,) = (document for document in documents if prose and all(text in document for text in prose))
    places = [document.index(text) for text in prose]
    assert len(places) > 2 and places == sorted(places)
