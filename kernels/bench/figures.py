"""Writes measurements as a CSV file that begins with lines on where they were made. Rooflines are drawn from such
files."""

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
    """End the process with a message if there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("the timed kernels need a GPU, and torch finds none")


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with an added option for the file of `write_figures`, and require a GPU."""
    parser.add_argument("--csv", type=Path, help="write the measurements there, for notebooks/kernels.ipynb")
    options = parser.parse_args()
    require_gpu()
    return options


class Figure(NamedTuple):
    """One measurement: the bytes to move, the operations if they are counted, and the times of kernel and reference."""

    kernel: str
    shape: str
    bytes: int
    flops: int | None
    kernel_us: float
    reference_us: float


def write_figures(path: Path | None, figures: Iterable[Figure]) -> None:
    """Write the measurements with the machine, the versions, the day and the command. Without a path do nothing."""
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
