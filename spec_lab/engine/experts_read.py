"""Counts, on the device, how many distinct experts the decode rounds read, and the bytes of their weights.

A matrix product of few rows takes as long as reading its weights, and only the chosen experts are read. So the number
of distinct experts determines the cost of verifying N rows, and the gain of dropping dead rows.

The choices of all layers are kept until a stage ends, and are then counted together. If all layers are alike, that
takes some ten small operators a stage, without a sync with the host. The sums are read after the last round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch

from spec_lab.core.kernel_set import ChoicesSeen
from spec_lab.core.results import ExpertCounts


class ReadingStage(IntEnum):
    """The stages of a round that run layers; the values are rows of the counts."""

    VERIFY = 0
    CATCHUP = 1
    RECUR = 2


class ExpertsRead:
    """Counts the experts read by the models of a run that are made with its `watch` (`KernelSet.watch_experts`).

    The engines of the run share it, so it counts for one pass at a time. Outside a stage, as in the prompt pass, it
    counts nothing.
    """

    MOST_REQUESTS = 2**16
    """Of a round, padding included: a batch is never near it."""

    def __init__(self, device: torch.device) -> None:
        # [stages, 2]: the experts and the bytes of each stage.
        self._counts = torch.zeros((len(ReadingStage), 2), dtype=torch.int64, device=device)
        self._expert_and_bytes: dict[int, torch.Tensor] = {}
        # It stays at one address, since the graph of a later stage reads what the graph of verify wrote.
        self._active = torch.zeros(self.MOST_REQUESTS, dtype=torch.bool, device=device)
        self._num_requests = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen: dict[tuple[torch.Size, int, int], list[torch.Tensor]] | None = None

    def watch(self, num_experts: int, expert_bytes: int) -> ChoicesSeen:
        """Return what counts the choices of a layer among so many experts, each of `expert_bytes`."""
        self._expert_and_bytes[expert_bytes] = torch.tensor([1, expert_bytes], device=self._counts.device)

        def saw(expert_ids: torch.Tensor) -> None:
            if self._seen is not None:
                self._seen.setdefault((expert_ids.shape, num_experts, expert_bytes), []).append(expert_ids)

        return saw

    def restart(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()

    def read(self) -> ExpertCounts | None:
        """Wait for the device, and return the number of experts of each stage; None if no layer has experts."""
        return ExpertCounts(*self._counts[:, 0].tolist()) if self._expert_and_bytes else None

    def read_bytes(self) -> ExpertCounts | None:
        """Return the bytes of these experts' weights in the same way."""
        return ExpertCounts(*self._counts[:, 1].tolist()) if self._expert_and_bytes else None

    def begin_round(self, active: torch.Tensor) -> None:
        """Note which requests of the batch count: `active` [batch] bool is False for padding."""
        if self._expert_and_bytes:
            self._active[: len(active)].copy_(active)
            self._num_requests.fill_(len(active))

    @contextmanager
    def stage(self, stage: ReadingStage) -> Iterator[None]:
        """Count the experts that layers choose inside the context. Every request has equally many rows."""
        if not self._expert_and_bytes:
            yield
            return
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
    """Count the distinct experts of each layer, and return their sum over layers as a tensor of one number.

    Args:
        expert_ids: [layers, rows, top_k] the chosen experts.
        counts: [rows] bool, whether a row counts.
    """
    chosen = torch.where(counts.view(1, -1, 1), expert_ids, num_experts).flatten(1)
    is_read = torch.zeros((len(expert_ids), num_experts + 1), dtype=torch.int64, device=expert_ids.device)
    return is_read.scatter_(1, chosen, 1)[:, :num_experts].sum()
