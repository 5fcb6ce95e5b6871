"""Prints the code lines of the repository by package: those without blanks, comments and docstrings.

    python scripts/lines.py [PATH...]    # files and folders that are new, which are counted by themselves

Python, C, templates and YAML count alike. Beside each count stands what the packages of a line are to come to.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PLANNED = {
    "core": 850,
    "checkpoints": 2450,
    "models operators attention": 4450,
    "acceptance drafters engine": 5800,
    "workloads": 600,
    "record": 1150,
    "config": 600,
    "options": 1250,
    "build": 550,
    "measure doctor lm_eval": 1820,
    "app": 300,
    "study": 1900,
    "train": 3300,
}
"""What packages of spec_lab that were planned together come to."""
PLANNED_FOLDERS = {"spec_lab": sum(PLANNED.values()), "kernels": 10_000, "tests": 26_000, "benchmarks": 900}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
HASH, C, TEMPLATE = r"^\s*#.*", r"/\*.*?\*/|//[^\n]*", r"\{#.*?#\}|<!--.*?-->"
COMMENTS = {
    **dict.fromkeys((".yaml", ".yml", ".sh"), re.compile(HASH, re.MULTILINE)),
    **dict.fromkeys((".c", ".h"), re.compile(C, re.DOTALL)),
    **dict.fromkeys((".html", ".css", ".js", ".j2", ".jinja"), re.compile(f"{TEMPLATE}|/\\*.*?\\*/", re.DOTALL)),
}
"""What is a comment, by the end of a file's name. Files of other kinds are no code."""


def python_lines(text: str) -> int:
    """Count the lines on which a token begins that is neither a comment nor a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    used = {token.start[0] for token in tokens if token.type not in NOT_CODE}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    used -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(used)


def code_lines(path: Path) -> int:
    """Count the code lines of a file; of a file that is no code there are none."""
    if path.suffix == ".py":
        return python_lines(path.read_text())
    if path.suffix not in COMMENTS:
        return 0
    return sum(1 for line in COMMENTS[path.suffix].sub("", path.read_text()).splitlines() if line.strip())


def counted(new: list[str]) -> Counter[tuple[str, str]]:
    """Count the files that git has or would add, by folder and package. What is below one of the paths `new` is counted
    under that path alone, and a file of spec_lab's own folder as `app`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines: Counter[tuple[str, str]] = Counter()
    for path in map(Path, filter(None, listed.split("\0"))):
        if path.is_file() and len(path.parts) > 1:
            apart = [name for name in new if path.is_relative_to(name)]
            package = path.parts[1] if len(path.parts) > 2 else "app"
            lines[("new", apart[0]) if apart else (path.parts[0], package)] += code_lines(path)
    return lines


def rows(lines: Counter[tuple[str, str]]) -> Iterator[tuple[str, int, int | None]]:
    """Yield name, code lines and planned ones of each line of the table."""
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for (folder, name), number in lines.items():
        packages[folder][name] += number
    lab, new = packages.pop("spec_lab"), packages.pop("new", Counter())
    whole = lab.total()
    for group, planned in PLANNED.items():
        yield group.replace(" ", ", "), sum(lab.pop(name, 0) for name in group.split()), planned
    yield from ((f"{name} (not planned)", number, 0) for name, number in lab.most_common() if number)
    yield "spec_lab", whole, PLANNED_FOLDERS["spec_lab"]
    folders = Counter({folder: inside.total() for folder, inside in packages.items()})
    yield from ((name, number, PLANNED_FOLDERS.get(name)) for name, number in folders.most_common() if number)
    yield from ((f"{name} (new)", number, None) for name, number in new.items())


def main() -> None:
    """Print the table."""
    print(f"{'package':36}{'now':>8}{'to be':>8}")
    for name, number, planned in rows(counted(sys.argv[1:])):
        print(f"{name:36}{number:8,}{'' if planned is None else format(planned, ','):>8}")


if __name__ == "__main__":
    main()
