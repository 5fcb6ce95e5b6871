"""Tells whether files are as they were, without reading them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def file_stamps(places: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return path, size and time of the last change of each file, and of each file of a folder, sorted by path."""
    files = [file for place in places for file in (place.iterdir() if place.is_dir() else [place])]
    stats = [(file, file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)
