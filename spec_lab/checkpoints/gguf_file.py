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

from spec_lab.checkpoints.json_input import refuse_values

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
    return path.suffix.lower() == ".gguf" and not path.is_dir()


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
        metadata: every key and its value.
        data_start: offset at which the tensors begin.
    """

    path: Path
    metadata: Mapping[str, Any]
    places: Mapping[str, TensorPlace]
    data_start: int

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def sizes(self) -> dict[str, Any]:
        """The keys of the architecture, without its name."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    def ids(self, key: str) -> list[int]:
        """Return one id or a list of them, empty if the key is missing."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", [])
        return value if isinstance(value, list) else [value]


def read_head(path: Path) -> GgufFile:
    """Read the header of a file. The two latest headers are cached until their file changes."""
    found = path.stat()
    return _read_head(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _read_head(path: Path, num_bytes: int, changed: int) -> GgufFile:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0

        def take(count: int) -> bytes:
            nonlocal at
            at += count
            return data[at - count : at]

        def numbers(code: str, count: int = 1) -> list[Any]:
            return list(struct.unpack(f"<{count}{code}", take(struct.calcsize(f"<{code}") * count)))

        def text() -> str:
            return take(numbers("Q")[0]).decode("utf-8")

        def value(kind: int) -> Any:
            if kind != ARRAY:
                return text() if kind == STRING else numbers(SCALARS[kind])[0]
            of, count = *numbers("I"), *numbers("Q")
            return [text() for _ in range(count)] if of == STRING else numbers(SCALARS[of], count)

        said = {"magic": take(4), "version": numbers("I")[0]}
        refuse_values(str(path), said, {"magic": (b"GGUF",), "version": (2, 3)})
        num_tensors, num_keys = numbers("Q", 2)
        metadata = {text(): value(numbers("I")[0]) for _ in range(num_keys)}
        places = {}
        for _ in range(num_tensors):
            name = text()
            shape = tuple(reversed(numbers("Q", numbers("I")[0])))
            places[name] = TensorPlace(name, shape, *numbers("I"), *numbers("Q"))
        alignment = metadata.get("general.alignment", 32)
        return GgufFile(path, metadata, places, -(-at // alignment) * alignment)
