"""Compares graph modes: a round of each, and its idle gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError
from spec_lab.gallery.studies import told_apart
from spec_lab.gallery.timeline import RoundTimeline, quietest_round
from spec_lab.record.paired import PairedRatio
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import number, percent, with_range
from spec_lab.report.graph_table import time_to_eager
from spec_lab.report.known_options import EAGER, describe_mode, place_of_mode

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class ModeRound:
    """A run of one mode, and the quietest of its profiled rounds."""

    mode: str
    summary: Summary
    timeline: RoundTimeline

    @property
    def is_eager(self) -> bool:
        """Return whether it is a round in eager mode; `mode` may name options and knobs after the mode."""
        return self.mode.partition(",")[0] == EAGER

    @property
    def launches(self) -> float:
        """Return launches in a round as the record counts them, else those of the trace. On a CPU the record leaves
        views out, and counts a composite operator as its parts."""
        counted = self.summary["launches_per_round"]
        return len(self.timeline.launches) / self._num_rounds if counted is None else counted

    @property
    def profiled_ms(self) -> float:
        """Return the time of one round under the profiler, even if the timeline has all rounds of a replay."""
        return self.timeline.length_us / 1e3 / self._num_rounds

    @property
    def _num_rounds(self) -> int:
        return self.summary["graph"].get("rounds_per_replay", 1)


def read_rounds(runs: Sequence[Run], batch_size: int = 1) -> list[ModeRound]:
    """Read a profiled round of each mode at a batch size; modes that capture less come first.

    Raises:
        UserError: there is no run of that batch size, or one has no trace that can be read.
    """
    sizes = sorted({run.summary["config"].get("batch_size", 1) for run in runs})
    found = [run for run in runs if run.summary["config"].get("batch_size", 1) == batch_size]
    if not found:
        raise UserError(f"no run has batch_size={batch_size}; there are {', '.join(map(str, sizes))}")
    names = told_apart(found, [describe_mode(run.summary) for run in found])
    named = zip(names, found, strict=True)
    rounds = [ModeRound(name, run.summary, quietest_round(run.folder)) for name, run in named]
    return sorted(rounds, key=_order)


def _order(each: ModeRound) -> tuple[int, str]:
    return place_of_mode(each.mode), each.mode


def times(rounds: Sequence[ModeRound]) -> pd.DataFrame:
    """Return one row for each mode: launches, the drawn round's idle share and longest gap, and a relative time.

    The time is that of a round without a profiler, relative to the eager reference, with its 95 % interval over turns.
    It is missing without such a reference.
    """
    import pandas as pd

    return pd.DataFrame([_row(each) for each in rounds])


def _row(each: ModeRound) -> dict[str, object]:
    ratio = time_to_eager(each.summary)
    low, high = (None, None) if ratio is None else ratio.ends
    return {
        "mode": each.mode,
        "launches": each.launches,
        "replays": each.summary["replays_per_round"],
        "idle share": each.timeline.idle_share,
        "longest gap, us": each.timeline.longest_gap_us,
        "profiled round, ms": each.profiled_ms,
        "timed round, ms": each.summary["round_ms"],
        "over eager": None if ratio is None else ratio.value,
        "low": low,
        "high": high,
    }


def conclude(rounds: Sequence[ModeRound]) -> str:
    """Say how many launches capturing saves, how gaps and time change, and what a CPU cannot show."""
    eagers = [each for each in rounds if each.is_eager]
    others = [each for each in rounds if not each.is_eager]
    if len(eagers) != 1 or not others:
        only = rounds[0]
        if not eagers:
            found = "no eager round"
        else:
            found = "nothing beside eager" if not others else "more than one eager round"
        return (
            f"There is {found} to compare here; in {only.mode} nothing ran for "
            f"{percent(only.timeline.idle_share, 0)} of the round."
        )
    [eager], fewest = eagers, min(others, key=lambda each: each.launches)
    is_counted = eager.summary["launches_per_round"] is not None
    on_cpu = "operators that compute or write" if is_counted else "operators not called by another one"
    what = "calls that submit work" if eager.timeline.on_gpu else on_cpu
    sentences = [
        f"An eager round is {number(eager.launches, 0)} launches ({what}); graph mode **{fewest.mode}** makes them "
        f"{number(fewest.launches, 0)}.",
        f"Nothing runs for {percent(eager.timeline.idle_share, 0)} of the eager round and for "
        f"{percent(fewest.timeline.idle_share, 0)} of this one; the longest gap is {_longest_gap(eager)} of the one "
        f"and {_longest_gap(fewest)} of the other.",
        _time(fewest, time_to_eager(fewest.summary)),
        "" if eager.timeline.on_gpu else CPU_NOTE,
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _longest_gap(each: ModeRound) -> str:
    return percent(each.timeline.longest_gap_us / each.timeline.length_us, 0)


CPU_NOTE = (
    "These runs are from a CPU, where the same processor launches and computes: a replay of the recorder is one launch "
    "in name, and still calls each operator from Python, so the gaps between operators are the interpreter's own. What "
    "a GPU's queue would hide of them is not seen here."
)


def _time(each: ModeRound, ratio: PairedRatio | None) -> str:
    if ratio is None:
        return "Its time is not set against eager's: no eager run took turns with it (references=[eager])."
    said = f"Timed without the profiler, a round in mode {each.mode} takes "
    said += f"{with_range(ratio.value, *ratio.ends)} of eager's time"
    if not ratio.is_judged:
        return f"{said}, with too few turns for an interval."
    return f"{said}{', within noise' if ratio.is_noise else ''}."
