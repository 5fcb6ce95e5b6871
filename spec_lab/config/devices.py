"""Says which kind of device a run will use, without importing torch. Composing, refusing and naming a run need this."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

BUILT_FOR_CUDA = re.compile(r"^cuda\b[^=]*= *['\"]", re.MULTILINE)


def runs_on_cuda(device: str) -> bool:
    """Return whether `device=...` is a CUDA device; auto is one if `has_cuda` finds one."""
    return has_cuda() if device == "auto" else device.startswith("cuda")


def has_cuda() -> bool:
    """Return whether torch was built for CUDA and the driver shows a GPU.

    CUDA itself is not asked: that would initialise it, and a launcher's worker could then not select its own GPU.
    """
    return _shows_gpus() and _torch_has_cuda()


def _shows_gpus() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    # The second path is the driver's under WSL (Linux inside Windows).
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def _torch_has_cuda() -> bool:
    """Return whether torch was built for CUDA, from its version file, without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    note = Path(spec.origin).with_name("version.py")
    return note.exists() and BUILT_FOR_CUDA.search(note.read_text(encoding="utf-8")) is not None
