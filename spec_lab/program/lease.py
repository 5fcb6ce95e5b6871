"""A worker leases a device for itself alone, so that jobs that run beside one another do not time each other.

A lease is a lock file a device in the system's temporary folder, the same for all of a host. The system gives the lock
back when its process ends, however it ends. Only workers of a launcher take leases; a run on its own does not ask.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from spec_lab.core.errors import UserError

CPU = "cpu"
SECONDS_BETWEEN_TRIES = 0.5
UUID = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)]+)\)")


@contextmanager
def leased(device: str) -> Iterator[None]:
    """Hold what a job with `device=...` will run on, waiting until it is free.

    A GPU stays with the process to its end, since CUDA cannot change it once it has started; the CPU is given back
    behind the job.

    Raises:
        UserError: the job names a GPU itself.
    """
    if device.startswith("cuda:"):
        raise UserError(f"device={device}: a launcher's worker takes the GPU that is free; use device=cuda")
    if device != CPU and visible_gpus():
        take_gpu()
        yield
        return
    _, descriptor = _wait_for([CPU])
    try:
        yield
    finally:
        os.close(descriptor)


@cache
def spread() -> None:
    """Give this process one of the GPUs, whoever else uses it, as jobs do whose times are not wanted."""
    gpus = visible_gpus()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[os.getpid() % len(gpus)]


def visible_gpus() -> list[str]:
    """List the GPUs that CUDA will show this process, by UUID, asked of the driver's own program and not of CUDA.

    Asking CUDA would start it, and what it shows could not be changed any more. Of a GPU in MIG mode these are its
    slices, of which CUDA shows a process one.
    """
    all_gpus = _gpus_of_the_driver()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return all_gpus
    names = [name.strip() for name in chosen.split(",")]
    found = [_by_uuid(name, all_gpus) for name in names]
    return [uuid for uuid in found if uuid is not None]


def _gpus_of_the_driver() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout
    uuids = UUID.findall(listed)
    slices = [uuid for uuid in uuids if uuid.startswith("MIG-")]
    return slices or uuids


def _by_uuid(name: str, all_gpus: Sequence[str]) -> str | None:
    """Return the UUID that an entry of CUDA_VISIBLE_DEVICES means: a number, or the beginning of one."""
    if name.isdigit():
        return all_gpus[int(name)] if int(name) < len(all_gpus) else None
    return next((uuid for uuid in all_gpus if name and uuid.startswith(name)), None)


@cache
def take_gpu() -> str:
    """Make one free GPU the only one of this process; called again, it is that one."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "a GPU is chosen before CUDA starts"
    uuid, _ = _wait_for(visible_gpus())  # the descriptor is never closed: the lease ends with the process
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    return uuid


def _wait_for(devices: Sequence[str]) -> tuple[str, int]:
    """Return the first of `devices` that is free and the descriptor that holds it."""
    says_so = True
    while True:
        for device in devices:
            descriptor = _try_lock(lock_file(device))
            if descriptor is not None:
                return device, descriptor
        if says_so:
            print(f"waiting for {' or '.join(devices)}, which other jobs are timed on", file=sys.stderr, flush=True)
            says_so = False
        time.sleep(SECONDS_BETWEEN_TRIES)


def lock_file(device: str) -> Path:
    """Name the file whose lock is the lease of a device. It is never removed: a lock of a removed file holds nobody
    off."""
    return Path(tempfile.gettempdir()) / f"spec_lab-{device.replace('/', '-')}.lock"


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None where another process has it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path) -> int:
    """Open for locking only, which another user's file allows too; a link that somebody laid there is not followed."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
