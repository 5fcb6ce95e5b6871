"""The device that a training runs on."""

from __future__ import annotations

import torch

from spec_lab.core.errors import UserError


def training_device(wanted: str) -> torch.device:
    """Return the device that `device=` names; `auto` takes a GPU if there is one.

    Raises:
        UserError: it is none, or torch finds no such GPU.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = wanted.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"device={wanted} is unknown; use auto, cpu, cuda or cuda:1")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={wanted}: torch finds {torch.cuda.device_count()} GPUs here; use device=auto")
    return device
