"""The type of stored ids, and the generator of a training step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def smallest_id_type(vocab_size: int) -> type[np.integer[Any]]:
    """Return the type for a vocabulary's ids: uint16 if it holds them, else int32."""
    types: tuple[type[np.integer[Any]], ...] = (np.uint16, np.int32)
    return next(each for each in types if vocab_size <= np.iinfo(each).max + 1)


def step_generator(step: int, seed: int, device: torch.device) -> torch.Generator:
    """Make the generator of one training step. It is on the device, since copying indices there would make the host
    wait."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step)
