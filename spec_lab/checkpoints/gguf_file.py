"""The header of a GGUF file: its metadata, and where its tensors are. Imports neither numpy nor torch.

The reader of the `gguf` package is not used: it makes several arrays for every token of a vocabulary, which takes
seconds, and silently truncates an array if the file ends early. A run reads the header before it imports torch.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from spec_lab.checkpoints.json_input import refuse_lfs_pointer
from spec_lab.core.errors import UserError, one_line

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""This tensor is not a weight but holds the divisors of the rotary embedding's frequencies."""
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""The `struct` codes of the types of metadata."""

Value = TypeVar("Value")


def is_gguf(path: Path) -> bool:
    """Return whether a checkpoint is a GGUF file: the path has the suffix, and is not a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def is_gguf_misnamed(path: Path) -> bool:
    """Return whether a file with another suffix is a GGUF file, such as a renamed or unfinished download."""
    if is_gguf(path) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's name, shape, type and place in the file.

    Attributes:
        shape: rows first, as in torch; the file has the reverse order.
        code: the number of its quantization type.
        offset: offset of its first byte from `GgufFile.data_start`.
    """

    name: str
    shape: tuple[int, ...]
    code: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file.

    Attributes:
        data_start: offset at which the tensors begin.
        num_bytes: size of the whole file.
    """

    path: Path
    metadata: Mapping[str, Any]
    places: Mapping[str, TensorPlace]
    data_start: int
    num_bytes: int

    def has(self, key: str) -> bool:
        return key in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        return self._read(key, int, "an integer", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._read(key, float, "a number", default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._read(key, str, "a text", default)

    def flag(self, key: str, default: bool) -> bool:
        return self._read(key, bool, "true or false", default)

    def texts(self, key: str) -> list[str]:
        """Read a list of texts, empty if the key is missing."""
        values: list[Any] = self._read(key, list, "a list of texts", [])
        if not all(type(value) is str for value in values):
            raise self.wrong(key, "a list of texts")
        return values

    def integers(self, key: str) -> list[int]:
        """Read one integer or a list of them, empty if the key is missing."""
        value = self.metadata.get(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(type(each) is int for each in values):
            raise self.wrong(key, "an integer or a list of integers")
        return values

    def wrong(self, key: str, kind: str) -> UserError:
        """Return the error for a value that is not of this kind."""
        value = self.metadata[key]
        shown = f"a list of {len(value)}" if isinstance(value, list) else one_line(repr(value))[:60]
        return UserError(f"{self.path}: {key} must be {kind}, but is {shown}; convert the model again")

    def _read(self, key: str, kind: type[Value], words: str, default: Value | None) -> Value:
        if key not in self.metadata:
            if default is None:
                raise UserError(f"{self.path}: {key} is missing; convert the model again")
            return default
        value = self.metadata[key]
        if type(value) is not kind:
            raise self.wrong(key, words)
        return value


def read_head(path: Path) -> GgufFile:
    """Read the header of a file. The two latest headers are cached until their file changes.

    Raises:
        UserError: no such file, or one that is damaged, cut short, or only part of a model.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: no such file ({error.strerror}); target.path must name a GGUF file") from error
    return _read_head(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _read_head(path: Path, num_bytes: int, changed: int) -> GgufFile:
    if num_bytes == 0:
        raise _damaged(path, "it is empty")
    refuse_lfs_pointer(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            head = _Cursor(path, data).head()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    num_parts = head.integer("split.count", 1)
    if num_parts > 1:
        raise UserError(f"{path}: is one of {num_parts} parts; merge them with llama-gguf-split --merge")
    return head


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: truncated, corrupt or not a GGUF file ({reason}); fetch it again")


class _Cursor:
    """Reads consecutive values, and refuses to read past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def head(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise _damaged(self._path, "it does not begin with GGUF")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise UserError(f"{self._path}: GGUF version {version} is not supported; supported are {VERSIONS}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise _damaged(self._path, f"it has {key[:60]!r} twice")
            metadata[key] = self._value(self._scalar("I"))
        places = [self._place() for _ in range(num_tensors)]
        by_name = {place.name: place for place in places}
        if len(by_name) < len(places):
            raise _damaged(self._path, "it has two tensors with the same name")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise _damaged(self._path, "general.alignment is not a positive integer")
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, by_name, start, len(self._data))

    def _place(self) -> TensorPlace:
        name, num_dimensions = self._text(), self._scalar("I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise _damaged(self._path, f"tensor {name[:60]!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._scalars("Q", num_dimensions)))
        if prod(shape) < 1:
            raise _damaged(self._path, f"tensor {name[:60]!r} is empty")
        return TensorPlace(name, shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise _damaged(self._path, f"a value has the unknown type {kind}")
        of, count = self._scalar("I"), self._scalar("Q")
        if of in SCALARS:
            return self._scalars(SCALARS[of], count)
        if of != STRING:
            raise _damaged(self._path, f"a list has the unsupported type {of}")
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        try:
            return self._take(self._scalar("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self._path, "a text is not in UTF-8") from error

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> list[Any]:
        taken = self._take(struct.calcsize(f"<{code}") * count)
        return list(struct.unpack(f"<{count}{code}", taken))

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise _damaged(self._path, "it ends inside its header")
        taken = self._data[self._at : end]
        self._at = end
        return taken
