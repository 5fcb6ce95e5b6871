"""Checks whether a cache fits before it is allocated, since Linux overcommits CPU memory and kills processes later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spec_lab.core.errors import UserError, enough_memory

GIBI = 2**30


def memory_of(device: torch.device) -> int:
    """Return the device's total memory in bytes, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def room_for(num_bytes: int, what: str, device: torch.device) -> Iterator[None]:
    """Wrap the allocation of `num_bytes`. Refuse it if the device's memory is smaller, or if the allocation fails.

    Args:
        what: the purpose of the memory, for the error message.

    Raises:
        UserError: there is not enough memory.
    """
    remedy = "use cache.num_pages=null and cache.page_size=16, or lower batch_size or max_new_tokens"
    total = memory_of(device)
    if num_bytes > total:
        raise UserError(f"{what} needs {num_bytes / GIBI:.1f} GiB, {device} has {total / GIBI:.1f} GiB; {remedy}")
    with enough_memory(f"{what} needs {num_bytes / GIBI:.1f} GiB, {device} has less free; {remedy}"):
        yield
