"""The random seeds of a run: one for each request. `spec_kernels.noise_reference` defines the draws from a seed."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch

from spec_kernels.noise_reference import Use
from spec_lab.core.types import Request

NoiseKey = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | int", Use], torch.Tensor]


def request_seed(run_seed: int, request_id: str) -> int:
    """Return the seed of a request. It depends on the run's seed and the request's id, and not on its slot or on the
    order of admission."""
    digest = blake2b(request_id.encode(), digest_size=8, key=f"spec_lab:{run_seed}".encode()).digest()
    return int.from_bytes(digest, "little", signed=True)


class SlotSeeds:
    """The request seed of each slot, in `values` [num_slots + 1]. The last entry is the scratch slot."""

    def __init__(self, num_slots: int, run_seed: int, device: torch.device) -> None:
        self._run_seed = run_seed
        self.values = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def admit(self, slot: int, request: Request) -> None:
        self.values[slot] = request_seed(self._run_seed, request.request_id)

    def of(self, slot_ids: torch.Tensor) -> torch.Tensor:
        return self.values.index_select(0, slot_ids)
