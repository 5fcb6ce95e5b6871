"""graph.metadata=stale: attention metadata whose windows stay, on purpose, those of the first recurrent draft step.

Before vLLM #41162 a captured draft loop moved positions, slots and sequence lengths from step to step. What a backend
had derived from them when it built the metadata stayed that of step 1: of a layer with a sliding window, the window's
first key and its length. So from step 2 on such a layer saw neither its own key nor those of the drafts before it.
vLLM's report describes an illegal memory access. Here drafts can differ from those with fresh metadata, from the third
on. Verify is not affected, since it has its own metadata.
"""

from __future__ import annotations

from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata


class StaleMover:
    """A `MetadataMover` with a deliberate bug: it advances everything but the windows, which stay those of step 1."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def advance(self, metadata: AttentionMetadata) -> None:
        self._backend.advance(metadata)
        if metadata.window_lens is None:
            metadata.window_lens = metadata.seq_lens.clone()
