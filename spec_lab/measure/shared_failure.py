"""A process of a run that fails ends all of them, and the first one says why, once.

A process that has failed is missed by the others in their next all-reduce, where they wait and cannot be told. So the
first process has a thread that waits for bad news in the store of `torchrun`, records them, prints them and ends the
process; `torchrun` then ends those that are left.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from spec_lab.core.errors import describe_error, is_interruption, one_line, trouble_of
from spec_lab.core.ranks import Ranks
from spec_lab.record.amend import amend_status

NEWS = "spec_lab/ending"
NOTHING = ""
"""These are the news where the first process ends by itself."""
PATIENCE_SECONDS = 5.0
"""A failed process waits so long before it says so: what all of them run into, the first one says itself."""
FOREVER = timedelta(days=365)


@contextmanager
def failures_shared(own: Ranks, folder: Path) -> Iterator[None]:
    """Let a failure inside the block end the processes of all ranks.

    Args:
        folder: of the first rank's record.
    """
    with _first_rank_listens(folder) if own.rank == 0 else _others_tell(own.rank):
        yield


@contextmanager
def _first_rank_listens(folder: Path) -> Iterator[None]:
    listener = threading.Thread(target=_listen, args=(_connect(), folder), daemon=True)
    listener.start()
    try:
        yield
    finally:
        _connect().compare_set(NEWS, "", NOTHING)
        listener.join()


def _listen(store: dist.Store, folder: Path) -> None:
    try:
        store.wait([NEWS], FOREVER)
        news = store.get(NEWS).decode()
    except RuntimeError:  # the store has gone, and with it all that could be told
        return
    if news == NOTHING:
        return
    told = json.loads(news)
    with suppress(OSError):  # the disk is full: the record says that the run was killed
        amend_status(folder, "failed", told["reason"])
    print(told["shown"], file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def _others_tell(rank: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_interruption(error):
            time.sleep(PATIENCE_SECONDS)
            _connect().set(NEWS, json.dumps(_told(rank, error)))
        raise


def _told(rank: int, error: Exception) -> dict[str, str]:
    """Return the line or the traceback that the first process prints for another one, and the reason that its record
    gives."""
    trouble = trouble_of(error)
    if trouble is None:
        shown = "".join(traceback.format_exception(error)) + f"failed: the error above is of rank {rank}"
        return {"shown": shown, "reason": f"rank {rank}: {describe_error(error)}"}
    line = f"rank {rank}: {one_line(trouble.line)}"
    return {"shown": f"failed: {line}", "reason": line}


def _connect() -> dist.Store:
    """Make a connection of one's own: while it waits, a connection is of no use to others."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
