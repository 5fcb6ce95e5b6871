"""What property tests throw: odd values for knobs, and files with a value, a byte or a line changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2, 3, 10**9, 2**53, 2**64, 10**400]),
    st.floats(),
    st.sampled_from([1e308, -1e308, 5e-324]),
    st.text(max_size=8),
    st.sampled_from(["finished", "strict", "relaxed_thinking", "\ud800", "\x1b[31m\n", "ü", "a$b$", "-" * 5000]),
)
VALUES = st.recursive(
    SCALARS, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside), max_leaves=4
)
JUNK = [b"", b"\n", b"{}\n", b"[" * 9999, b'"', b"\xff\xfe", b"NaN"]

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    st.sampled_from([2**31, 2**63, 10**9, 10**400, -(10**400), "9" * 6000]),
    st.floats(),
    st.sampled_from(["1e-320", "1e999", "-0.0", "0x10", "1_000", "NaN", "-.inf", "1e5"]),
)
EMPTY = ["", "null", "???", "[]", "{}", "''", "[null]"]
NESTED = ["[1,[2,nan]]", "{a:1}", "[{a:1}]", "[1,", "{a:", "[" * 3000]
GRAMMAR = ["${seed}", "${nope}", "${oc.env:HOME}", "1,2", "range(0,3)", "glob(*)", "choice(1,2)", "a=b", "'", "\\"]
TEXTS = ["true", "\n", "\udcff", "\0", "\x1b[31m", "'\x1b[31m'", "ü", "../../x", "x" * 5000]
LISTS = st.lists(st.integers(-(10**20), 10**20), max_size=3).map(lambda numbers: f"[{','.join(map(str, numbers))}]")
TYPED = st.one_of(NUMBERS, st.sampled_from([*EMPTY, *NESTED, *GRAMMAR, *TEXTS]), LISTS, st.text(max_size=8)).map(str)
"""What may be typed behind `KEY=`."""


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one place in it replaced, left out, repeated or moved under a name of its own."""
    if isinstance(value, dict) and value and draw(st.integers(0, 7)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: draw(changed(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        tail = value[index + 1 :]
        replaced = draw(st.sampled_from([[], [value[index]] * 2, None]))
        return value[:index] + ([draw(changed(value[index]))] if replaced is None else replaced) + tail
    return draw(VALUES)


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` cut, with a stretch replaced, or with something put in."""
    at = draw(st.integers(0, len(data)))
    length = draw(st.sampled_from([0, 1, 5, len(data)]))
    junk = draw(st.one_of(st.binary(max_size=6), st.sampled_from(JUNK)))
    return data[:at] + junk + data[at + length :]


@st.composite
def changed_json(draw: st.DrawFn, data: bytes) -> bytes:
    """A JSON file with a value changed, or its bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(changed_bytes(data))
    return json.dumps(draw(changed(json.loads(data)))).encode()


@st.composite
def changed_lines(draw: st.DrawFn, data: bytes) -> bytes:
    """A JSON Lines file with a value of a line changed, or its bytes."""
    lines = data.splitlines(keepends=True) or [b"{}"]
    index = draw(st.integers(0, len(lines) - 1))
    lines[index] = draw(changed_json(lines[index])) + b"\n"
    return b"".join(lines)


@st.composite
def changed_header(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file with a value of its header changed, or its header's bytes, or cut short."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = draw(st.sampled_from(["value", "value", "bytes", "length", "cut"]))
    if kind == "length":
        return draw(changed_bytes(data[:8])) + header + rest
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    header = draw(changed_bytes(header)) if kind == "bytes" else json.dumps(draw(changed(json.loads(header)))).encode()
    return len(header).to_bytes(8, "little") + header + rest


Change = Callable[[bytes], st.SearchStrategy[bytes]]
CHANGES: dict[str, Change] = {".json": changed_json, ".jsonl": changed_lines, ".safetensors": changed_header}
"""By the end of a file's name; any other file has its bytes changed."""


@contextmanager
def written(path: Path, data: bytes) -> Iterator[None]:
    """`path` with other content for a while."""
    kept = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(kept)


@contextmanager
def damaged(path: Path, data: st.DataObject) -> Iterator[None]:
    """`path` as its kind of file may be broken."""
    with written(path, data.draw(CHANGES.get(path.suffix, changed_bytes)(path.read_bytes()))):
        yield
