"""Measurements as rows of a CSV file, below lines that say where they were made: what a roofline is drawn from."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch


def require_gpu() -> None:
    """End the process in a line where there is no GPU to time anything on."""
    if not torch.cuda.is_available():
        sys.exit("what is timed here runs on a GPU, and torch sees none")


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, which may also say where `write_figures` writes, and require a GPU."""
    parser.add_argument("--csv", type=Path, help="write the measurements there, for notebooks/kernels.ipynb")
    options = parser.parse_args()
    require_gpu()
    return options


class Figure(NamedTuple):
    """One measurement: what has to move and to be multiplied, and how long the kernel and its reference took."""

    kernel: str
    shape: str
    bytes: int
    flops: int | None
    kernel_us: float
    reference_us: float


def write_figures(path: Path | None, figures: Iterable[Figure]) -> None:
    """Write the measurements with the machine, the versions, the day and the command; nothing without a path."""
    if path is None:
        return
    import triton

    command = " ".join(["python", *sys.argv])
    with path.open("w", newline="") as file:
        file.write(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}\n")
        file.write(f"# {datetime.now(UTC):%Y-%m-%d}, {command}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Figure._fields)
        writer.writerows(figures)
