"""While a sweep runs, or is only shown, it is said once where auto takes something else for a job than for others."""

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
        """Say what auto took differently for this job than for those before, where it is the first of its kind."""
        self._seen.append(dataclasses.asdict(config))
        for name, line in mixed_by_auto(self._seen).items():
            if name not in self._said:
                print(line, file=sys.stderr, flush=True)
                self._said.add(name)
