"""llama.cpp in this process, by the package `xllamacpp`, which the tests that use it skip if it is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parameters(xllamacpp: Any, model: Path, kind: str) -> Any:
    """llama.cpp in float32 with chains of 3 drafts."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(model), 512, 1, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    draft = params.speculative.draft
    draft.n_max, draft.n_min, draft.p_min = 3, 0, 0.0
    for part in (params, draft):
        part.cache_type_k = part.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return params


def answer(server: Any, **asked: Any) -> Any:
    said = server.handle_completions({"temperature": 0, "cache_prompt": False, **asked})
    return json.loads(said) if isinstance(said, str) else said
