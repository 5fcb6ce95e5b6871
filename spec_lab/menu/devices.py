"""Says on what kind of device a run will be, before torch is imported: composing, refusing and naming need to know."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

BUILT_FOR_CUDA = re.compile(r"^cuda\b[^=]*= *['\"]", re.MULTILINE)


def runs_on_cuda(device: str) -> bool:
    """Tell whether `device=...` is a CUDA device; auto is one where `has_cuda` finds one."""
    return has_cuda() if device == "auto" else device.startswith("cuda")


def has_cuda() -> bool:
    """Tell whether torch was built for CUDA and the driver shows a GPU.

    CUDA itself is not asked: that would start it, after which a launcher's worker could not take a GPU of its own.
    """
    return _shows_gpus() and _torch_has_cuda()


def _shows_gpus() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    # The second is where Windows puts its driver for the Linux inside it (WSL).
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def _torch_has_cuda() -> bool:
    """Tell it from torch's own note of how it was built, which is read and not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    note = Path(spec.origin).with_name("version.py")
    return note.exists() and BUILT_FOR_CUDA.search(note.read_text(encoding="utf-8")) is not None
