"""Caches the hidden states of rows that a target has already run, so that later epochs need not run it again.

On a CPU the target's forward can be more than half of a step. On a GPU it is a small part, and a captured step always
runs it, so nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.frozen_target import FrozenOutputs, FrozenTarget
from spec_lab.train.packed_rows import PackedRows


@dataclass(slots=True)
class KeptStates:
    """Runs a target over rows, and caches its outputs. A step uses it in place of the `FrozenTarget`.

    Once the cache is full, it keeps its rows and takes no more. Each epoch draws every row once, so another row in
    place of one of them would save no more forwards.

    Attributes:
        most_bytes: the limit of the cache.
        num_bytes: its current size.
    """

    target: FrozenTarget
    most_bytes: float
    num_bytes: int = 0
    _kept: dict[bytes, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens)

    def run(self, rows: PackedRows, taps: Sequence[Tap]) -> FrozenOutputs:
        """Return the target's outputs for rows [batch, length], without keys and values. Rows that are not cached are
        run together."""
        names = [bytes(row.numpy().data) for row in torch.cat([rows.tokens, rows.segments], dim=1)]
        missing = [place for place, name in enumerate(names) if name not in self._kept]
        made: dict[bytes, tuple[Tensor, Tensor]] = {}
        if missing:
            outputs = self.target.run(rows.rows(torch.tensor(missing)), taps)
            for place, tapped, final_hidden in zip(missing, outputs.tapped, outputs.final_hidden, strict=True):
                made[names[place]] = tapped, final_hidden
        found = [self._kept.get(name) or made[name] for name in names]
        for name, states in made.items():
            self._keep(name, states)
        tapped, final_hidden = (torch.stack(states) for states in zip(*found, strict=True))
        return FrozenOutputs(tapped, final_hidden, rows.tokens)

    def _keep(self, name: bytes, states: tuple[Tensor, Tensor]) -> None:
        num_bytes = sum(state.nbytes for state in states)
        if self.num_bytes + num_bytes <= self.most_bytes:
            self._kept[name] = states[0].clone(), states[1].clone()
            self.num_bytes += num_bytes
