"""If one process of a run fails, all of them end, and the process of rank 0 says why, once.

If a process fails, the others wait for it in their next all-reduce, where they cannot be notified. So a thread of the
first process, which has rank 0, waits for a failure message in the store of `torchrun`. It records and prints the
message, and ends the process. `torchrun` then ends the other processes.
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

from spec_lab.core.errors import Breakdown, UserError, describe_error, one_line
from spec_lab.core.ranks import Ranks
from spec_lab.record.recorder import ended, write_run

NEWS = "spec_lab/ending"
NOTHING = ""
"""The message that ends the thread when the first process ends by itself."""
PATIENCE_SECONDS = 5.0
"""How long a failed process waits before it sends its message. If the first process has the same error, it prints the
error itself in this time."""
FOREVER = timedelta(days=365)


@contextmanager
def failures_shared(own: Ranks, folder: Path) -> Iterator[None]:
    """Make a failure inside the block end the processes of all ranks.

    Args:
        folder: the folder of the first rank's record.
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
    except RuntimeError:  # the store is gone, so no message can come
        return
    if news == NOTHING:
        return
    from spec_lab.record.reading import read_run

    told = json.loads(news)
    with suppress(OSError):  # on a full disk the record keeps saying that the run was killed
        write_run(folder, ended(read_run(folder), "failed", told["reason"]))
    print(told["shown"], file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def _others_tell(rank: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        time.sleep(PATIENCE_SECONDS)
        _connect().set(NEWS, json.dumps(_told(rank, error)))
        raise


def _told(rank: int, error: Exception) -> dict[str, str]:
    """Return the text that the first process prints for another one, and the reason for its record."""
    if not isinstance(error, (UserError, Breakdown)):
        shown = "".join(traceback.format_exception(error)) + f"failed: the error above is of rank {rank}"
        return {"shown": shown, "reason": f"rank {rank}: {describe_error(error)}"}
    line = f"rank {rank}: {one_line(error)}"
    return {"shown": f"failed: {line}", "reason": line}


def _connect() -> dist.Store:
    """Make a separate connection, since a connection that waits is blocked for other uses."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
