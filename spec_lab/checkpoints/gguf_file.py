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
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.checks import refuse_lfs_pointer, refuse_values

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""This tensor is not a weight but holds the divisors of the rotary embedding's frequencies."""
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""The `struct` codes of the types of metadata."""


def is_gguf(path: Path) -> bool:
    """Return whether a checkpoint is a GGUF file: the path has the suffix, and is not a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


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
    """

    path: Path
    metadata: Mapping[str, Any]
    places: Mapping[str, TensorPlace]
    data_start: int

    def has(self, key: str) -> bool:
        return key in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._read(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._read(key, default))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._read(key, default))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._read(key, default))

    def texts(self, key: str) -> list[str]:
        """Read a list of texts, empty if the key is missing."""
        values: list[str] = self._read(key, [])
        return values

    def integers(self, key: str) -> list[int]:
        """Read one integer or a list of them, empty if the key is missing."""
        value = self.metadata.get(key, [])
        return value if isinstance(value, list) else [value]

    def _read(self, key: str, default: Any) -> Any:
        """Return a value; KeyError if it is missing and has no default."""
        return self.metadata[key] if default is None else self.metadata.get(key, default)


def read_head(path: Path) -> GgufFile:
    """Read the header of a file. The two latest headers are cached until their file changes."""
    found = path.stat()
    return _read_head(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _read_head(path: Path, num_bytes: int, changed: int) -> GgufFile:
    refuse_lfs_pointer(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(path, data).head()


class _Cursor:
    """Reads consecutive values."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def head(self) -> GgufFile:
        magic, version = self._take(4), self._scalar("I")
        refuse_values(str(self._path), {"magic": magic, "version": version}, {"magic": (MAGIC,), "version": VERSIONS})
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata = {self._text(): self._value(self._scalar("I")) for _ in range(num_keys)}
        places = [self._place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, {place.name: place for place in places}, start)

    def _place(self) -> TensorPlace:
        name, num_dimensions = self._text(), self._scalar("I")
        shape = tuple(reversed(self._scalars("Q", num_dimensions)))
        return TensorPlace(name, shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        assert kind == ARRAY, f"{self._path}: a value has the unknown type {kind}"
        of, count = self._scalar("I"), self._scalar("Q")
        return [self._text() for _ in range(count)] if of == STRING else self._scalars(SCALARS[of], count)

    def _text(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> list[Any]:
        taken = self._take(struct.calcsize(f"<{code}") * count)
        return list(struct.unpack(f"<{count}{code}", taken))

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return taken
