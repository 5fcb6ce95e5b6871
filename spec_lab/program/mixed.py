"""Prints, once for each knob in a sweep or its preview, that `auto` chose different options for different jobs."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from spec_lab.menu.config import RunConfig
from spec_lab.record.mixed import mixed_by_auto


class MixNote:
    """Sees the composed jobs of a sweep, one after the other."""

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []
        self._said: set[str] = set()

    def see(self, config: RunConfig) -> None:
        """Print each knob for which `auto` chose another option than for earlier jobs, if it was not printed yet."""
        self._seen.append(dataclasses.asdict(config))
        for name, line in mixed_by_auto(self._seen).items():
            if name not in self._said:
                print(line, file=sys.stderr, flush=True)
                self._said.add(name)
