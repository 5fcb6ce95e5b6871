"""The device that a training runs on."""

from __future__ import annotations

import torch

from spec_lab.errors import UserError


def training_device(wanted: str) -> torch.device:
    """Return the device that `device=` names; `auto` takes a GPU if there is one.

    Raises:
        UserError: torch finds no such GPU.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={wanted}: torch finds {torch.cuda.device_count()} GPUs here; use device=auto")
    return device
