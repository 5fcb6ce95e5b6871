"""graph.metadata=stale: attention metadata whose lengths are deliberately not updated after the first draft step.

Backends derive window starts and schedules from seq_lens. Before vLLM #41162, a captured draft loop kept those of step
1 for all steps. vLLM's report describes an illegal memory access. Here the draft tokens can differ from those with
fresh metadata, and they differ more with a smaller window. Verify is not affected, since it has its own metadata.
"""

from __future__ import annotations

from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata


class StaleMover:
    """A `MetadataMover` with a deliberate bug: it advances positions and slot_mapping, but not seq_lens."""

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
