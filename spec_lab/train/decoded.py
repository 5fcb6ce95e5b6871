"""Measures a drafter by real decoding, with the metrics of the lab's runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.record.draft_counts import acceptance_length, draft_counts
from spec_lab.train.serving import Serving

NUM_RESAMPLES = 500


def decoded(serving: Serving, drafter: str, folder: Path | None, requests: Sequence[Request]) -> dict[str, Any]:
    """Decode with a drafter; return its `figures`, and with several categories those of each."""
    records = serving.decode(drafter, folder, requests)
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    by_category = {name: figures(group, serving.num_draft_tokens) for name, group in sorted(groups.items())}
    return {**figures(records, serving.num_draft_tokens), "by_category": by_category if len(groups) > 1 else {}}


def figures(records: Sequence[RequestRecord], num_draft_tokens: int) -> dict[str, Any]:
    """Return the figures of some requests, with a 95 % bootstrap interval over requests."""
    drawn = np.random.default_rng(0).integers(len(records), size=(NUM_RESAMPLES, len(records)))
    lengths = [acceptance_length([records[index] for index in sample], num_draft_tokens) for sample in drawn]
    known = [length for length in lengths if length is not None]
    return {
        "acceptance_length": acceptance_length(records, num_draft_tokens),
        "interval": [float(bound) for bound in np.percentile(known, [2.5, 97.5])] if known else None,
        "conditional_rates": draft_counts(records, num_draft_tokens).conditional,
        "requests": len(records),
    }
