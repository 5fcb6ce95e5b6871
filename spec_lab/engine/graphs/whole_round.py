"""graph=round: verify, accept, commit, catch-up and all draft steps are one graph."""

from __future__ import annotations

import torch

from spec_lab.core.types import Verification
from spec_lab.engine.graphs.captured import Bucket, CapturedMode
from spec_lab.engine.round import DecodeRound


class WholeRound(CapturedMode):
    """Replays one graph a round; what it reads is the slot ids, what it leaves for the host is the verification."""

    def _run(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        def run(slot_ids: torch.Tensor) -> Verification:
            return decode_round.run(decode_round.load(slot_ids, self._max_kv_len))

        verification: Verification = self._segment(bucket, decode_round, "round", run, stage="graph")(slot_ids)
        return verification
