"""This module counts, on the device, how many different experts the rounds of a pass read, and their bytes.

A product of few rows takes as long as its weights take to be read, and of experts only the chosen ones are: so what
verifying N rows costs, and what dropping dead rows saves, is the number of different experts among the rows' choices.

Each layer's choices are kept until its stage ends, and are then counted together: eight small operators a stage, and
none that asks the host for anything. The sums are read once, after the last round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum

import torch

from spec_lab.core.results import ExpertCounts
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.routers import Routing


class ReadingStage(IntEnum):
    """The stages of a round that run rows through layers, by their place among the counts."""

    VERIFY = 0
    CATCHUP = 1
    RECUR = 2


class ExpertsRead:
    """Counts for the models of a run, which its engines share: one pass at a time.

    It keeps the protocol `RoutingObserver`. Outside a stage, in the prompt pass for one, it counts nothing.
    """

    def __init__(self, device: torch.device, max_requests: int) -> None:
        """`max_requests`: the most requests that a round has, padding with them."""
        # Experts and bytes of each stage.
        self._counts = torch.zeros((len(ReadingStage), 2), dtype=torch.int64, device=device)
        self._expert_and_bytes: dict[int, torch.Tensor] = {}
        # At fixed addresses: a graph of a later stage reads what that of verify left.
        self._active = torch.zeros(max_requests, dtype=torch.bool, device=device)
        self._num_requests = torch.zeros(1, dtype=torch.int64, device=device)
        self._is_watching = False
        self._seen: dict[tuple[torch.Size, int, int], list[torch.Tensor]] | None = None

    def watch(self, parts: Iterable[ExpertMLP]) -> None:
        """Count the choices of these parts from now on."""
        for part in parts:
            num_bytes = part.experts.expert_bytes
            self._expert_and_bytes[num_bytes] = torch.tensor([1, num_bytes], device=self._counts.device)
            part.observer = self
            self._is_watching = True

    def restart(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()

    def read(self) -> ExpertCounts | None:
        """Wait for the device, and return the sums; None where no layer has experts."""
        return ExpertCounts(*self._counts[:, 0].tolist()) if self._is_watching else None

    def read_bytes(self) -> ExpertCounts | None:
        """Return the same of the bytes of their weights."""
        return ExpertCounts(*self._counts[:, 1].tolist()) if self._is_watching else None

    def begin_round(self, active: torch.Tensor) -> None:
        """Note which of the batch's requests are no padding, from [batch] bool."""
        if self._is_watching:
            self._active[: len(active)].copy_(active)
            self._num_requests.fill_(len(active))

    def stage(self, stage: ReadingStage) -> AbstractContextManager[None]:
        """Count what the layers choose meanwhile, each for equally many rows of every request."""
        return self._stage(stage) if self._is_watching else nullcontext()

    def saw(self, routing: Routing, num_experts: int, expert_bytes: int) -> None:
        if self._seen is not None:
            kind = (routing.expert_ids.shape, num_experts, expert_bytes)
            self._seen.setdefault(kind, []).append(routing.expert_ids)

    @contextmanager
    def _stage(self, stage: ReadingStage) -> Iterator[None]:
        seen: dict[tuple[torch.Size, int, int], list[torch.Tensor]] = {}
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None
        for (shape, num_experts, expert_bytes), choices in seen.items():
            rows = torch.arange(shape[0], device=self._counts.device)
            counts = self._active.index_select(0, rows * self._num_requests // shape[0])
            read = count_distinct(torch.stack(choices), num_experts, counts)
            self._counts[stage].add_(read * self._expert_and_bytes[expert_bytes])


def count_distinct(expert_ids: torch.Tensor, num_experts: int, counts: torch.Tensor) -> torch.Tensor:
    """Count the different experts of each layer, and add the layers up: a tensor of one number.

    Args:
        expert_ids: [layers, rows, chosen].
        counts: [rows] bool; the others are left out.
    """
    chosen = torch.where(counts.view(1, -1, 1), expert_ids, num_experts).flatten(1)
    is_read = torch.zeros((len(expert_ids), num_experts + 1), dtype=torch.int64, device=expert_ids.device)
    return is_read.scatter_(1, chosen, 1)[:, :num_experts].sum()
