"""The output folder of a training: made after the checks, logged into, and removed if empty after a refusal."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_lab.core.errors import UserError, describe_os_error

LOG_FILE = "spec_lab.train.log"
BOOKKEEPING = ("records", "checkpoints")
LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"


@contextmanager
def output_folder(root: Path) -> Iterator[None]:
    """Make `root` if it is missing, and append the log messages of the block to a file in it.

    If the block is refused, folders that were made here are removed, unless they hold finished stages or files of
    others.

    Raises:
        UserError: `root` cannot be made or written.
        Breakdown: its disk is full.
    """
    made = _make(root)
    try:
        with _logging_to(root / LOG_FILE):
            yield
    except UserError:
        if made:
            _remove_bookkeeping(root)
        _remove_empty(made)
        raise


def _make(root: Path) -> list[Path]:
    """Make the folder, and return the folders that were created, deepest first."""
    missing: list[Path] = []
    try:
        missing = [folder for folder in (root, *root.parents) if not os.path.lexists(folder)]
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except (OSError, ValueError) as error:
        _remove_empty(missing)
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        raise UserError(f"output_dir={root} cannot be written ({reason}); choose another one") from error
    return missing


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    if file.exists() and not file.is_file():
        raise UserError(f"output_dir={file.parent}: {file.name} is not a file; choose another output_dir")
    handler = logging.FileHandler(file, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _remove_bookkeeping(root: Path) -> None:
    """Remove the empty folders of bookkeeping, and the log if nothing else is left."""
    _remove_empty([root / name for name in BOOKKEEPING])
    if [path.name for path in root.iterdir()] == [LOG_FILE]:
        (root / LOG_FILE).unlink()


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
