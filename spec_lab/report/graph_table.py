"""The table that compares graph modes: runs that differ only in `graph` and the batch size, such as those of
`experiment=graph_modes`. `python -m spec_lab.report FOLDER` shows the table of a sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec_lab.record.paired import PairedRatio, over_reference
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import ABSENT, number, percent
from spec_lab.report.cells import ratio_cell
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.known_options import EAGER, describe_mode, place_of_mode
from spec_lab.report.lines_plot import PlottedNumber, ends_of
from spec_lab.report.table import format_table, paragraph

NOTE = """\
ms a round: median over turns of the mean time of a round. to eager: this time over that of the same run without
capture, which takes turns with it (references=[eager]), with a 95 % interval from three turns on. CPU span: from the
host's first call of a launch until all of a round is launched. launches, replays, syncs: in a round, counted outside
the timed part. captures: of the whole run, including warm-up and smaller batches; on a GPU each graph is captured
twice, and the two are replayed in turn. nodes: of the graphs captured last. With attention=torch a captured round reads
keys up to the longest possible length, and an eager round up to the longest of its batch."""


def read_graph_comparisons(runs: Sequence[Run]) -> list[list[Run]]:
    """Find finished runs that differ in graph mode and batch size alone, sorted by batch size, eager first.

    A batch size without an eager run or without another mode is left out. Of runs with the same batch size and
    `describe_mode` the newest is used.
    """
    groups: dict[str, dict[tuple[int, str], Run]] = {}
    for run in runs:
        config = run.summary["config"]
        if run.summary["status"] == "finished" and "graph" in config:
            cell = (_batch_size(run), describe_mode(run.summary))
            groups.setdefault(_shared_key(config), {})[cell] = run
    compared = (
        [cells[key] for key in sorted(cells, key=_order) if _is_compared(key, cells)] for cells in groups.values()
    )
    return [runs for runs in compared if runs]


def format_graph_comparison(runs: Sequence[Run]) -> str:
    """Write the table of one comparison, one line for each run, and whether acceptance length is the same in all
    modes."""
    header = [
        "batch", "graph", "ms a round", "to eager", "launches", "replays", "syncs", "GPU idle", "CPU span ms",
        "captures", "nodes", "acceptance length",
    ]  # fmt: skip
    eager = {_batch_size(run): run.summary for run in runs if describe_mode(run.summary) == EAGER}
    body = [[str(_batch_size(run)), describe_mode(run.summary), *_cells(run.summary)] for run in runs]
    lengths = "\n".join(_compare_lengths(batch_size, runs) for batch_size in eager)
    return "\n\n".join([format_table(header, body, left=("graph", "nodes"), num_keys=2), lengths, paragraph(NOTE)])


def time_to_eager(summary: Summary) -> PairedRatio | None:
    """Return a round's time over that of the eager reference; None if no eager reference was measured in turns with
    it."""
    return over_reference(summary, summary, "eager", "round_ms")


def plotted_times(runs: Sequence[Run]) -> list[PlottedNumber]:
    """Return each run's time of a round over that of its eager reference, as one line for each batch size. A run in
    another mode without that reference is left out."""
    found = []
    for run in runs:
        batch_size, mode = _batch_size(run), describe_mode(run.summary)
        ratio = 1.0 if mode == EAGER else time_to_eager(run.summary)
        if ratio is not None:
            found.append(PlottedNumber(mode, f"batch {batch_size}", *ends_of(ratio)))
    return found


def _cells(summary: Summary) -> list[str]:
    return [
        number(summary["round_ms"], 3),
        ratio_cell(time_to_eager(summary)),
        number(summary["launches_per_round"], 1),
        number(summary["replays_per_round"], 1),
        number(summary["host_syncs_per_round"], 1),
        percent(summary["gpu_idle_share"]),
        number(summary["launch_ms"], 3),
        str(summary["graph"]["captures"]),
        _nodes(summary["graph"]["nodes"]),
        number(summary["acceptance_length"], 3),
    ]


def _nodes(nodes: Mapping[str, int | None]) -> str:
    return " ".join(f"{name} {ABSENT if count is None else count}" for name, count in nodes.items()) or ABSENT


def _compare_lengths(batch_size: int, runs: Sequence[Run]) -> str:
    summaries = [run.summary for run in runs if _batch_size(run) == batch_size]
    lengths = {describe_mode(summary): summary["acceptance_length"] for summary in summaries}
    expected = lengths[EAGER]
    different = [f"{mode} {number(length, 4)}" for mode, length in lengths.items() if length != expected]
    if not different:
        return f"Batch {batch_size}: acceptance length is {number(expected, 4)} in all modes."
    return f"Batch {batch_size}: acceptance length DIFFERS: {EAGER} {number(expected, 4)}, {'; '.join(different)}."


def _batch_size(run: Run) -> int:
    return int(run.summary["config"].get("batch_size", 1))


def _is_compared(cell: tuple[int, str], cells: Mapping[tuple[int, str], Run]) -> bool:
    same_batch = {mode for batch_size, mode in cells if batch_size == cell[0]}
    return EAGER in same_batch and len(same_batch) > 1


def _order(cell: tuple[int, str]) -> tuple[int, int, str]:
    batch_size, mode = cell
    return batch_size, place_of_mode(mode), mode


def _shared_key(config: Mapping[str, Any]) -> str:
    """Return a key of the configuration without graph mode and batch size."""
    without = (*BESIDE_THE_RUN, "graph", "batch_size")
    return json.dumps({key: value for key, value in config.items() if key not in without}, sort_keys=True)
