"""Offered load: when requests arrive.

The gaps between arrivals are drawn from a gamma distribution with the mean 1 / rate, as vLLM's benchmark draws them.
Burstiness 1 makes them exponential, so that arrivals are a Poisson process; less is burstier, more is steadier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_lab.core.types import Request


def arriving(
    requests: Sequence[Request], rate: float, burstiness: float, duration: float | None, seed: int
) -> list[Request]:
    """Return the requests with arrival times, in order; those that would arrive after `duration` seconds are left out.

    Args:
        rate: requests per second.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=len(requests))
    times = np.cumsum(gaps).tolist()
    pairs = zip(requests, times, strict=True)
    return [replace(request, arrives_at=at) for request, at in pairs if duration is None or at <= duration]
