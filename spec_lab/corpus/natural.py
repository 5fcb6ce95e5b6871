"""Natural text from Python's standard library: its source code, and the prose in it.

A file's path decides the split of its code, docstrings and comments. A file has the same path in Python 3.11 and 3.12,
so the eval prompts of one version are not in the training text of the other. `workloads.make_prompts` also checks that
they share no long window.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from spec_lab.corpus.split import FILES_PER_EVAL_FILE, Split, split_of

# Among others tests, demos, bundled or third-party code, tables of characters, and modules that Python 3.12 lacks.
_SKIPPED_FOLDERS = frozenset(
    [
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "distutils",
        "site-packages",
        "dist-packages",
        "encodings",
        "lib-dynload",
        "ensurepip",
        "turtledemo",
        "pydoc_data",
        "__pycache__",
        "__phello__",
        "msilib",
        "idle_test",
    ]
)
_SKIPPED_FILES = frozenset(
    ["asynchat.py", "asyncore.py", "imp.py", "smtpd.py", "_bootsubprocess.py", "stringprep.py", "this.py"]
)
_TOPICS = "pydoc_data/topics.py"

_MIN_DOCUMENT_CHARACTERS = 400
_MIN_PROSE_CHARACTERS = 160
_SENTENCE_CHARACTERS = (30, 110)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@lru_cache(maxsize=1)
def _sources() -> tuple[tuple[str, str], ...]:
    """Return (module path, source) of every file in use, sorted by path."""
    root = _library()
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        folders = name.split("/")[:-1]
        skipped = name in _SKIPPED_FILES or name.startswith("_sysconfigdata") or _is_build_folder(folders)
        if skipped or _SKIPPED_FOLDERS.intersection(folders):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        if len(source) >= _MIN_DOCUMENT_CHARACTERS:
            found.append((name, source.strip() + "\n"))
    return tuple(found)


def _is_build_folder(folders: list[str]) -> bool:
    return any(folder.startswith("config-") for folder in folders)


@lru_cache(maxsize=2)
def code_documents(split: Split) -> tuple[str, ...]:
    """Return whole source files of the split."""
    return tuple(source for name, source in _sources() if split_of(name, FILES_PER_EVAL_FILE) == split)


@lru_cache(maxsize=2)
def prose_documents(split: Split) -> tuple[str, ...]:
    """Return the prose of the split: docstrings and comments of each file, help topics, and the licence."""
    documents = [
        prose
        for name, source in _sources()
        if split_of(name, FILES_PER_EVAL_FILE) == split and len(prose := _prose_of(source)) >= _MIN_PROSE_CHARACTERS
    ]
    for name, text in _standalone_texts():
        if split_of(name, FILES_PER_EVAL_FILE) == split and len(text) >= _MIN_PROSE_CHARACTERS:
            documents.append(text.strip() + "\n")
    return tuple(documents)


def _standalone_texts() -> Iterator[tuple[str, str]]:
    """Yield (key, text) of prose outside source files. Texts that this machine does not have are left out."""
    root = _library()
    licence = root / "LICENSE.txt"
    if licence.exists():
        yield "LICENSE.txt", licence.read_text(encoding="utf-8", errors="ignore")
    topics = root / _TOPICS
    if topics.exists():
        for statement in ast.parse(topics.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign):
                for topic, text in ast.literal_eval(statement.value).items():
                    yield f"{_TOPICS}#{topic}", text


def _prose_of(source: str) -> str:
    """Return a file's docstrings, and its comments of two or more lines, unindented, with blank lines between them.

    Pieces that are short or have few letters are left out.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template among the sources, not a module
        return ""
    pieces = [
        text
        for node in _statements(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    comments = re.findall(r"(?:^[ \t]*#.*\n){2,}", source, flags=re.MULTILINE)
    pieces.extend(re.sub(r"^[ \t]*#+ ?", "", block, flags=re.MULTILINE).strip() for block in comments)
    return "\n\n".join(piece for piece in pieces if _is_prose(piece)) + "\n"


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield `tree` and the statements in it, in the order of `ast.walk`, which goes through expressions too."""
    kinds = ast.stmt | ast.excepthandler | ast.match_case
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list) and value and isinstance(value[0], kinds):
                todo.extend(value)
        yield node


def _is_prose(piece: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in piece)
    return len(piece) >= 40 and letters >= 0.8 * len(piece)


@lru_cache(maxsize=2)
def prose_sentences(split: Split) -> tuple[str, ...]:
    """Return the different plain sentences of the split's prose, without those that have quotes, code or numbers."""
    shortest, longest = _SENTENCE_CHARACTERS
    pattern = re.compile(r"(?:(?<=[.] )|(?<=\n\n)|^)([A-Z][a-z]*(?:,? [A-Za-z][a-z'-]*){4,})[.:;](?=\s)")
    found: dict[str, None] = {}
    for document in prose_documents(split):
        for paragraph in document.split("\n\n"):
            for sentence in pattern.findall(" ".join(paragraph.split()) + " "):
                if shortest <= len(sentence) <= longest:
                    found[sentence] = None
    return tuple(found)


def natural_text(split: Split) -> Iterator[str]:
    """Yield whole documents for pre-training: every source file, then all prose, most of which thus occurs twice."""
    yield from code_documents(split)
    yield from prose_documents(split)
