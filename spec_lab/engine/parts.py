"""The parts of a round, and the output of verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend, MetadataMover
from spec_lab.core.protocols import AcceptanceRule, Drafter, StageTimer, Target
from spec_lab.core.types import RoundBatch
from spec_lab.engine.experts_read import ExpertsRead
from spec_lab.engine.slots import SlotState


@dataclass(slots=True)
class Parts:
    """Everything a round consists of. `mover` is the backend, unless an experiment makes the metadata stale."""

    target: Target
    drafter: Drafter[Any]
    rule: AcceptanceRule
    backend: AttentionBackend
    mover: MetadataMover
    cache: PagedKVCache
    slots: SlotState
    timer: StageTimer
    experts_read: ExpertsRead


@dataclass(slots=True)
class VerifyOutput:
    """The target's output for a batch: logits [batch, N, vocab], and features for the drafter [batch * N, ...]."""

    batch: RoundBatch
    logits: torch.Tensor
    features: torch.Tensor | None
