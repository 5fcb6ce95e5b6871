"""Whether another process used a run's device, which makes its times meaningless."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import torch


class Company:
    """Watches the device of a run, from its beginning to `seen`.

    Runs of the lab share the lock of a file for each device, so that each notices the others. On a GPU the driver also
    lists all other processes.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = None if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)
        path = Path(tempfile.gettempdir()) / f"spec_lab-{os.getuid()}-{self._gpu or 'cpu'}.lock"
        self._file = path.open("w")
        self._began_alone = self._is_alone()

    def seen(self) -> bool:
        """Return whether another process was on the device, and stop watching."""
        alone = self._began_alone and self._is_alone() and not (self._gpu and _others_on(self._gpu))
        self._file.close()
        return not alone

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._file, fcntl.LOCK_SH)
        return True


def _others_on(gpu: str) -> bool:
    """Return whether the driver lists more processes on a GPU than this one."""
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid",
        "--format=csv,noheader",
        f"--id=GPU-{gpu.removeprefix('GPU-')}",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return len(listed.split()) > 1
