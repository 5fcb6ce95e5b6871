"""Says which kind of device a run will use, without importing torch. Composing, refusing and naming a run need this."""

from __future__ import annotations

import multiprocessing
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


def visible_gpus() -> list[str]:
    """Return the GPUs of the machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.strip().split(",") if gpu not in ("", "-1")]
    return sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))


def take_own_gpu() -> None:
    """Let a worker process use the GPU of its number alone, before CUDA starts. Other processes keep all GPUs."""
    number, gpus = multiprocessing.current_process()._identity, visible_gpus()
    if number and len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[(number[-1] - 1) % len(gpus)]


def _shows_gpus() -> bool:
    # The path is the driver's under WSL (Linux inside Windows).
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ and not visible_gpus()
    return bool(visible_gpus()) or (not is_hidden and Path("/usr/lib/wsl/lib/libcuda.so.1").exists())


def _torch_has_cuda() -> bool:
    """Return whether torch was built for CUDA, from its version file, without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    note = Path(spec.origin).with_name("version.py")
    return note.exists() and BUILT_FOR_CUDA.search(note.read_text(encoding="utf-8")) is not None
