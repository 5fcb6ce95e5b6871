"""graph.metadata=stale: attention metadata that stops following the draft loop after its first step, on purpose.

Before vLLM #41162 a captured draft loop kept what backends derive from the length (window starts, schedules) as
it was at step 1. The source reports an illegal access; here it shows as drafts that differ from those of a fresh build,
and the more so the smaller the window. The output stays right: verify does not read this.
"""

from __future__ import annotations

from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata


class StaleMover:
    """A `MetadataMover` that does it wrong: positions and slots move, lengths and what follows from them stay."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def advance(self, metadata: AttentionMetadata) -> None:
        moved = self._backend.build(
            positions=(metadata.positions + 1).unsqueeze(1),
            seq_lens=metadata.seq_lens,
            page_table=metadata.page_table,
            max_seq_len=metadata.max_seq_len,
        )
        metadata.positions.copy_(moved.positions)
        metadata.slot_mapping.copy_(moved.slot_mapping)
