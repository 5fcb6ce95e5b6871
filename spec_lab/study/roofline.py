"""Compares kernels with the roofline: the time of each, and the least time that its bytes and operations need.

The figures are rows of CSV files from `kernels/bench/*.py --csv FILE`. Lines that begin with # say where they were
measured.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spec_lab.core.errors import UserError
from spec_lab.study.figures import PALETTE, axes_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MARKERS = "osD^vP*Xd<>"
COLUMNS = ("kernel", "shape", "bytes", "flops", "kernel_us", "reference_us")
NUMBERS = COLUMNS[2:]


class Roof(NamedTuple):
    """The peak rates of a device."""

    name: str
    bytes_per_second: float
    flops_per_second: float


H200 = Roof("NVIDIA H200", 4.2e12, 790e12)
"""The rates were measured with a streaming read, and with a bfloat16 product of two matrices of 8192 x 8192."""


def load_figures(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the rows of every `*.csv` in the folder, one for each measurement, with the name of their file.

    Raises:
        UserError: there is no such file, or one has another layout.
    """
    import pandas as pd

    place = Path(folder)
    files = sorted(place.glob("*.csv"))
    if not files:
        raise UserError(
            f"{place}: it has no *.csv; make one on a GPU with python kernels/bench/attention.py --csv FILE"
        )
    return pd.concat([_read(path) for path in files], ignore_index=True)


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    frame = pd.read_csv(path, comment="#")
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise UserError(f"{path}: no column {missing[0]}; kernels/bench/*.py --csv FILE write {', '.join(COLUMNS)}")
    numbers = frame[list(NUMBERS)].apply(pd.to_numeric, errors="coerce")
    return frame[["kernel", "shape"]].join(numbers).assign(file=path.name)


def provenance(folder: str | os.PathLike[str]) -> str:
    """Return the comment lines of the files, each with its file's name."""
    lines = [
        f"{path.name}: {line.removeprefix('#').strip()}"
        for path in sorted(Path(folder).glob("*.csv"))
        for line in path.read_text().splitlines()
        if line.startswith("#")
    ]
    return "\n".join(lines)


def against_roof(figures: pd.DataFrame, roof: Roof = H200) -> pd.DataFrame:
    """Return the figures with four more columns: `floor_us`, the least time that bytes and products need; `bound`,
    `memory` or `products`, whichever needs it; `of_roof`, that time over the kernel's; `over_reference`, the
    reference's time over the kernel's."""
    memory, compute = figures["bytes"] / roof.bytes_per_second, figures["flops"].fillna(0) / roof.flops_per_second
    floor = memory.where(memory >= compute, compute) * 1e6
    return figures.assign(
        floor_us=floor,
        bound=["memory" if m >= c else "products" for m, c in zip(memory, compute, strict=True)],
        of_roof=floor / figures["kernel_us"],
        over_reference=figures["reference_us"] / figures["kernel_us"],
    )


def time_against_bytes(frame: pd.DataFrame, roof: Roof = H200) -> Figure:
    """Draw time over the bytes that must be moved, on logarithmic scales.

    A filled marker is a kernel, and a hollow one its torch reference on the same bytes. The line is the roof's
    bandwidth. Only data that stays in cache can be below it.
    """
    import numpy as np
    import seaborn as sns

    names = list(frame.groupby("kernel")["bytes"].max().sort_values(ascending=False).index)
    with axes_of(height=5.2, width=9.0) as (figure, axes):
        for name, colour, marker in zip(names, sns.color_palette(PALETTE, len(names)), MARKERS, strict=False):
            part = frame[frame["kernel"] == name].sort_values("bytes")
            size = part["bytes"] / 1e6
            style = {"marker": marker, "color": colour, "linestyle": "none", "markersize": 7}
            axes.plot(size, part["kernel_us"], label=name, **style)
            axes.plot(size, part["reference_us"], fillstyle="none", alpha=0.8, **style)
            axes.vlines(size, part["kernel_us"], part["reference_us"], color=colour, linewidth=0.6, alpha=0.5)
        ends = np.array([frame["bytes"].min() / 2, frame["bytes"].max() * 2])
        bandwidth = f"{roof.bytes_per_second / 1e12:g} TB/s"
        axes.plot(ends / 1e6, ends / roof.bytes_per_second * 1e6, color="black", label=bandwidth)
        axes.plot([], [], "o", fillstyle="none", color="0.4", label="the torch reference")
        axes.set(xscale="log", yscale="log", xlabel="bytes that have to move, MB", ylabel="microseconds")
        axes.set_title(f"Kernels against the bandwidth of an {roof.name}", loc="left")
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def rate_against_intensity(frame: pd.DataFrame, roof: Roof = H200) -> Figure:
    """Draw the roofline for kernels that multiply: operations per second over operations per byte. Left of the ridge a
    kernel is bound by memory, right of it by the tensor cores."""
    import numpy as np
    import seaborn as sns

    part = frame[frame["flops"] > 0].sort_values("bytes")
    with axes_of(height=4.4) as (figure, axes):
        colours = sns.color_palette(PALETTE, 2)
        intensity = part["flops"] / part["bytes"]
        for column, label, colour in (("kernel_us", "kernel", colours[0]), ("reference_us", "reference", colours[1])):
            size = 15 + 25 * np.log10(part["bytes"] / 1e6).clip(lower=0)
            axes.scatter(intensity, part["flops"] / part[column] / 1e6, s=size, color=colour, label=label, alpha=0.85)
        ridge = roof.flops_per_second / roof.bytes_per_second
        xs = np.array([0.5, ridge, 20 * ridge])
        axes.plot(xs, np.minimum(xs * roof.bytes_per_second, roof.flops_per_second) / 1e12, color="black", label="roof")
        axes.annotate(
            f"{roof.bytes_per_second / 1e12:g} TB/s", (2, 3.2 * 4.2), rotation=0, fontsize="small", ha="right"
        )
        axes.annotate(
            f"{roof.flops_per_second / 1e12:g} TFLOP/s", (ridge, 1.15 * roof.flops_per_second / 1e12), fontsize="small"
        )
        axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s (larger dots move more bytes)")
        axes.set_ylim(top=3 * roof.flops_per_second / 1e12)  # room for the words above the roof
        axes.set_title(f"Kernels that multiply, on the roofline of an {roof.name}", loc="left")
        figure.legend(loc="outside right upper", frameon=False)
    return figure
