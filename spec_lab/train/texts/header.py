"""The header of a folder of texts: the target that wrote them, the settings, and the finished files."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.json_input import parse_json
from spec_lab.core.errors import UserError
from spec_lab.train.reading import reading
from spec_lab.train.stages import write_json

HEADER = "header.json"
FORMAT = 1
NUM_BLOCKS, BLOCK = 64, 2**16
MAY_DIFFER = ("seed", "prompts", "num_texts", "texts_per_file")
"""The settings in which parallel writers may differ."""
WRITE_AGAIN = "name another folder, or write the texts again"


def refuse_without_header(header: Path, *patterns: str) -> None:
    """Raise UserError if the folder of `header` has no header, but has files that match `patterns`."""
    if header.exists():
        return
    for file in (file for pattern in patterns for file in header.parent.glob(pattern)):
        raise UserError(f"output_dir={header.parent} has {file.name}, but no {HEADER}; name another folder")


@dataclass(frozen=True, slots=True)
class WrittenBy:
    """The target of some texts.

    Attributes:
        weights: a digest of its files (`digest_of_weights`).
        tokenizer: a digest of its whole tokenizer.
        template: a digest of its chat template; empty if it has none.
    """

    target: str
    weights: str
    tokenizer: str
    template: str
    vocab_size: int


@dataclass(slots=True)
class TextsHeader:
    """`header.json` of a folder of texts.

    Attributes:
        settings: the settings of the texts; resuming requires the same ones.
        files: each finished file with its counts. Files that are not listed are unfinished.
        sources: the digest of each source of prompts; empty for a generator.
    """

    written_by: WrittenBy
    settings: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)

    def counts(self, kind: str) -> Counter[str]:
        """Return the sums over the files whose names begin with `kind`: prompts, followups or answers."""
        total: Counter[str] = Counter()
        for name, counts in self.files.items():
            total.update(counts if name.startswith(kind) else {})
        return total

    def write(self, folder: Path) -> None:
        """Replace the header atomically."""
        write_json(folder / HEADER, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> TextsHeader:
        """Read the header of a folder.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        file = folder / HEADER
        if not file.is_file():
            if (folder.parent / HEADER).is_file():
                raise UserError(
                    f"{folder} is no folder of texts, and {folder.parent} is one; use texts={folder.parent}"
                )
            raise UserError(
                f"{folder} has no texts ({HEADER} is missing); write some with python -m spec_lab.train.texts"
            )
        with reading(file, WRITE_AGAIN):
            content = parse_json(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not {"format", "written_by"} <= content.keys():
                raise UserError(
                    f"{file} is not a header of texts; name a folder that python -m spec_lab.train.texts wrote"
                )
            if content["format"] != FORMAT:
                raise UserError(
                    f"{file} has format {content['format']!r}, but only format {FORMAT} can be read; write the texts "
                    "again"
                )
            by = WrittenBy(**content["written_by"])
            if not all(isinstance(content[key], dict) for key in ("settings", "sources", "files")):
                raise TypeError("a part of it is not an object")
            header = cls(by, content["settings"], content["sources"], content["files"])
            for kind in ("prompts", "followups", "answers"):
                header.counts(kind)
            return header

    def refuse_another(self, other: TextsHeader, folder: Path) -> None:
        """Raise UserError that names the differences, if texts with the header `other` cannot continue these."""
        if changed := self._changed(other):
            raise UserError(
                f"output_dir={folder} has texts that were written with a different {', '.join(changed)}; choose "
                "another output_dir"
            )

    def refuse_beside(self, other: TextsHeader, folder: Path) -> None:
        """Raise UserError if the texts of `folder` differ from these beyond `MAY_DIFFER`, or have the same prompts."""
        if changed := [name for name in self._changed(other) if name not in MAY_DIFFER]:
            raise UserError(
                f"{folder} holds texts written with another {', '.join(changed)} than those beside it; learn from one "
                "of these folders, or take one away"
            )
        files = [name for name, digest in other.sources.items() if digest and digest in self.sources.values()]
        has_one_seed = self.settings.get("seed") == other.settings.get("seed")
        if files or (has_one_seed and self._generators() & other._generators()):
            both, own = (f"the prompts of {files[0]}", "prompts") if files else ("prompts of one seed", "a seed")
            raise UserError(
                f"{folder} and a folder beside it both hold answers to {both}, so the same text could be learnt and "
                f"held out; give every writer {own} of its own"
            )

    def _generators(self) -> set[str]:
        """Return the generators that drew prompts by the seed: tasks, without their counts, or the target if no source
        is named."""
        if not self.sources:
            return {"target"}
        return {name.split(":")[1] for name, digest in self.sources.items() if not digest}

    def _changed(self, other: TextsHeader) -> list[str]:
        mine, its = self._identity(), other._identity()
        return [name for name in its if mine.get(name) != its[name]]

    def _identity(self) -> dict[str, Any]:
        by = {name: value for name, value in asdict(self.written_by).items() if name != "target"}
        return {**by, **self.settings, "prompts": self.sources}


def digest_of_weights(path: Path) -> str:
    """Return a digest of a target's weights. It reads only parts of the files, since reading all may take minutes.

    It covers each file's size and 64 evenly spread blocks of 64 KiB.
    """
    files = [path] if is_gguf(path) else sorted(path.glob("*.safetensors")) or [path / "config.json"]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            digest.update(str(size).encode())
            for place in range(NUM_BLOCKS):
                opened.seek(max(0, size - BLOCK) * place // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def digest_of_text(text: str | None) -> str:
    """Return a digest of a text; empty for none."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return a digest of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while part := opened.read(2**20):
            digest.update(part)
    return digest.hexdigest()
