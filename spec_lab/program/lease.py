"""Lets a worker lease a device for itself, so that jobs running at the same time do not disturb each other's timings.

A lease is the lock on a device's file in the system's temporary folder. The system releases the lock when its process
ends in any way. Only workers of a launcher take leases; other runs do not.
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
    """Wait until the device for a job with `device=...` is free, and hold it.

    A GPU is held until the process ends, since a process cannot change its GPU once CUDA has started. The CPU is
    released after the job.

    Raises:
        UserError: the job names a GPU itself.
    """
    if device.startswith("cuda:"):
        raise UserError(f"device={device}: a launcher's worker takes a free GPU; use device=cuda")
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
    """Give this process one of the GPUs, even if others use it, for jobs that are not timed."""
    gpus = visible_gpus()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[os.getpid() % len(gpus)]


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, by UUID, using the driver's program rather than CUDA.

    Calling CUDA would initialise it, after which the visible GPUs can no longer be changed. If there are MIG slices,
    only these are listed, without whole GPUs. CUDA shows a process only one slice.
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
    """Return the UUID for an entry of CUDA_VISIBLE_DEVICES, which is a number or the beginning of a UUID."""
    if name.isdigit():
        return all_gpus[int(name)] if int(name) < len(all_gpus) else None
    return next((uuid for uuid in all_gpus if name and uuid.startswith(name)), None)


@cache
def take_gpu() -> str:
    """Make one free GPU the only one visible to this process; later calls return the same one."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "a GPU is chosen before CUDA starts"
    uuid, _ = _wait_for(visible_gpus())  # the descriptor is never closed: the lease ends with the process
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    return uuid


def _wait_for(devices: Sequence[str]) -> tuple[str, int]:
    """Return the first of `devices` to become free, and the descriptor that holds its lock."""
    says_so = True
    while True:
        for device in devices:
            descriptor = _try_lock(lock_file(device))
            if descriptor is not None:
                return device, descriptor
        if says_so:
            print(f"waiting for {' or '.join(devices)}, on which other jobs are timed", file=sys.stderr, flush=True)
            says_so = False
        time.sleep(SECONDS_BETWEEN_TRIES)


def lock_file(device: str) -> Path:
    """Return the file whose lock is the lease of a device. It is never removed, since a lock on a removed file is
    useless."""
    return Path(tempfile.gettempdir()) / f"spec_lab-{device.replace('/', '-')}.lock"


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None if another process has it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path) -> int:
    """Open a file for locking only, which also works for another user's file. Links are not followed."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
