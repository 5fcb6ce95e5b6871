"""The tables for the terminal: of one run, or of several runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from spec_lab.core.errors import one_line
from spec_lab.record.answer_metrics import answers_cut
from spec_lab.record.definitions import DEFINITIONS
from spec_lab.record.mixed import mixed_by_auto
from spec_lab.record.paired import over_reference
from spec_lab.record.runs import Run
from spec_lab.record.schema import READING_STAGES, THIS_RUN, Outcome, Speed, Summary
from spec_lab.record.time_metrics import STAGES
from spec_lab.record.verdict import verdict
from spec_lab.record.versions import old_definition
from spec_lab.record.wording import ABSENT, gibibytes, number, percent
from spec_lab.report.cells import accuracy_cell, ratio_cell
from spec_lab.report.differing import knob_value, telling_apart
from spec_lab.report.known_options import describe_rule
from spec_lab.report.table import format_table, paragraph, text_width

CUT = "cut"
"""Shown in place of an accuracy of 0 if all checked outputs ran into max_new_tokens; the definitions explain it."""
SOMETIMES = {
    "budget": ("verify", "budget"),
    "rollback": ("recurrent", "rollback"),
    "attention": ("attention", "name"),
    "kernels": ("kernels",),
}
"""Columns that are shown only if the runs differ in them, by the place of their value in the configuration."""
IMPOSED = "* the acceptance was imposed, not measured"


def format_run(summary: Summary) -> str:
    """Write one run: its configurations, its categories and the verdict; only the verdict if it did not finish."""
    parts = [paragraph(verdict(summary))]
    if summary["status"] == "finished":
        speeds = _configurations(summary)
        tables = [
            _speed_table(summary),
            _stage_table(speeds),
            _experts_table(speeds),
            _metrics_table(speeds),
            format_categories(summary),
        ]
        notes = [IMPOSED if summary["acceptance_imposed"] else "", old_definition([summary])]
        parts = [*tables, _pieces_line(summary), _memory_line(summary), *notes, *parts]
    return "\n\n".join(part for part in parts if part)


def _pieces_line(summary: Summary) -> str:
    """Say which stages are captured together, so that they cannot be timed separately; empty if there are none."""
    for stage, holds in (("draft", "catchup and recur"), ("graph", "the whole round")):
        if summary["stage_ms_per_round"].get(stage) is not None:
            mode = summary["graph"]["mode"]
            return paragraph(f"{stage} is {holds}, one piece of graph={mode}; graph=eager times its stages separately")
    return ""


def _memory_line(summary: Summary) -> str:
    """Say the run's peak memory; empty if it is not recorded."""
    memory = summary.get("memory")
    if memory is None:
        return ""
    most, before, on_gpu = memory["peak_rss_bytes"], memory["start_rss_bytes"], memory["peak_cuda_bytes"]
    there = "" if on_gpu is None else f"; on the GPU {gibibytes(on_gpu)}"
    return f"peak memory {gibibytes(most)}, of which {gibibytes(before)} before anything was loaded{there}"


def format_runs(runs: Sequence[Run]) -> str:
    """Write a line for each run, then their stage times if there are several, then why some did not finish."""
    summaries = [run.summary for run in runs]
    header, body = run_cells(runs)
    words = ("drafter", "prune", "rollback", "attention", "kernels", "rule", "status", "folder")
    parts = [format_table(header, body, left=words), *mixes(runs)]
    if any(summary["acceptance_imposed"] for summary in summaries):
        parts.append(IMPOSED)
    parts.append(old_definition(summaries))
    by_label = {f"#{index}": summary for index, summary in enumerate(summaries, start=1)}
    finished = {key: summary for key, summary in by_label.items() if summary["status"] == "finished"}
    if len(finished) > 1:
        parts.append(_stage_table(finished))
    unfinished = [summary for summary in by_label.items() if summary[1]["status"] != "finished"]
    if unfinished:
        parts.append(
            "\n".join(one_line(f"{key} {summary['status']}: {summary['reason']}") for key, summary in unfinished)
        )
    return "\n\n".join(part for part in parts if part)


def run_cells(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of runs. If runs would have the same label, a column is added for
    each knob in which they differ."""
    varied = [name for name in SOMETIMES if len({_sometimes(name, run.summary) for run in runs}) > 1]
    summaries = [run.summary for run in runs]
    knobs = telling_apart(summaries, [tuple(_identity(summary, varied)) for summary in summaries])
    header = [
        "#", "drafter", "prune", "K", "batch", *varied, "rule", *knobs, "acceptance length", "decode tok/s",
        "speedup over plain", "accuracy", "peak memory", "status", "folder",
    ]  # fmt: skip
    body = [[f"#{index}", *_run_cells(run, varied, knobs)] for index, run in enumerate(runs, start=1)]
    return header, body


def mixes(runs: Sequence[Run]) -> list[str]:
    """Return a paragraph for each knob for which `auto` chose different options on devices of the same kind."""
    ran = [run.summary for run in runs if run.summary["status"] != "refused"]
    kinds = dict.fromkeys(summary["device"] for summary in ran)
    lines = [mixed_by_auto(s["config"] for s in ran if s["device"] == kind).values() for kind in kinds]
    return [paragraph(line) for of_kind in lines for line in of_kind]


def format_categories(summary: Summary) -> str:
    """Write one run's categories, lowest first: acceptance length, rate at each draft position, accuracy."""
    if not summary["by_category"]:
        return ""
    num_draft_tokens = summary["num_draft_tokens"] or 0
    positions = [f"accepted at {position}" for position in range(1, num_draft_tokens + 1)]
    mark = "*" if summary["acceptance_imposed"] else ""
    lossy = _lossy_columns(summary) | _part_columns(summary)
    header = ["category", "requests", "rounds", "acceptance length", *positions, "accuracy", *lossy]
    outcomes = sorted(summary["by_category"].items(), key=lambda item: item[1]["acceptance_length"] or 0.0)
    body = [
        [
            category,
            str(outcome["num_requests"]),
            f"{outcome['rounds']:,}",
            number(outcome["acceptance_length"]) + mark,
            *[percent(rate) for rate in outcome["acceptance_rate_by_position"]["unconditional"]],
            _accuracy(outcome, summary, summary["acceptance_imposed"]),
            *[show(outcome) for show in lossy.values()],
        ]
        for category, outcome in [*outcomes, ("all", summary)]
    ]
    return format_table(header, body, left=("category",))


def _lossy_columns(summary: Summary) -> dict[str, Callable[[Outcome], str]]:
    """Return the additional columns of a lossy run: thinking, distance, relaxed hits, outputs equal to plain."""
    if summary["acceptance_lossless"] is not False or summary["acceptance_imposed"]:
        return {}
    return {
        "thinking tokens": lambda outcome: number((outcome["thinking"] or {}).get("mean_tokens"), 1),
        "TV a token": lambda outcome: number((outcome.get("distance") or {}).get("total_variation"), 4),
        "relaxed hits": lambda outcome: number((outcome["relaxed"] or {}).get("hits"), 0),
        "equal to plain": lambda outcome: percent(outcome["equal_to_plain"]),
    }


def _part_columns(summary: Summary) -> dict[str, Callable[[Outcome], str]]:
    """Return the additional columns of a drafter with several parts: accepted drafts of those offered, for each
    part."""

    def shown(outcome: Outcome, name: str) -> str:
        counts = (outcome.get("parts") or {}).get(name)
        return "-" if counts is None else f"{counts['accepted']} of {counts['offered']}"

    names = [name for name in summary.get("parts") or {} if name]
    return {f"from {name}": partial(shown, name=name) for name in names}


def format_definitions() -> str:
    """Explain every number, in one paragraph each."""
    width = max(len(name) for name in DEFINITIONS) + 2
    lines = [
        textwrap.fill(definition, text_width(), initial_indent=name.ljust(width), subsequent_indent=" " * width)
        for name, definition in DEFINITIONS.items()
    ]
    return "\n".join(["Definitions", *lines])


def _configurations(summary: Summary) -> dict[str, Speed]:
    return {THIS_RUN: summary, **summary["references"]}


def _speed_table(summary: Summary) -> str:
    header, body = speed_cells(summary)
    return format_table(header, body, left=("",))


def speed_cells(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of speeds: a row for the run, and one for each of its references."""
    header = ["", "acceptance length", "decode tok/s", "end-to-end tok/s", "speedup over plain", "accuracy"]
    parts: dict[str, Outcome] = {THIS_RUN: summary, **summary["references"]}
    body = [
        [
            name,
            number(parts[name]["acceptance_length"]) + ("*" if _is_imposed(name, summary) else ""),
            number(speed["decode_tokens_per_second"], 1),
            number(speed["end_to_end_tokens_per_second"], 1),
            ratio_cell(over_reference(speed, summary, "plain")),
            _accuracy(parts[name], summary, _is_imposed(name, summary)),
        ]
        for name, speed in _configurations(summary).items()
    ]
    return header, body


def _is_imposed(name: str, summary: Summary) -> bool:
    return name != "plain" and summary["acceptance_imposed"]


def _stage_table(speeds: Mapping[str, Speed]) -> str:
    header, body = stage_cells(speeds)
    return format_table(header, body, left=("ms a round",))


def stage_cells(speeds: Mapping[str, Speed]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of stage times, one row for each configuration."""
    seen = [
        stage
        for stage in dict.fromkeys(
            [*STAGES, *(stage for speed in speeds.values() for stage in speed["stage_ms_per_round"])]
        )
        if any(speed["stage_ms_per_round"].get(stage) is not None for speed in speeds.values())
    ]
    body = [
        [
            name,
            *[number(speed["stage_ms_per_round"].get(stage), 3) for stage in seen],
            number(speed["round_ms"], 3),
            number(speed["prefill_ms_per_request"], 3),
        ]
        for name, speed in speeds.items()
    ]
    return ["ms a round", *seen, "round", "prompt pass"], body


def _metrics_table(speeds: Mapping[str, Speed]) -> str:
    """Return the numbers of extensions' metrics; empty if there are none."""
    names = list(dict.fromkeys(name for speed in speeds.values() for name in speed.get("metrics", {})))
    if not names:
        return ""
    body = [
        [name, *(number(speed.get("metrics", {}).get(metric), 3) for metric in names)] for name, speed in speeds.items()
    ]
    return format_table(["metric", *names], body, left=("metric",))


def _experts_table(speeds: Mapping[str, Speed]) -> str:
    """Return how many distinct experts a round read and their bytes, by stage; empty if none were counted."""
    counts = {name: read for name, speed in speeds.items() if (read := speed.get("experts_read")) is not None}
    if not counts:
        return ""
    sizes = {name: speed.get("expert_bytes_read") for name, speed in speeds.items()}
    body = [
        [
            name,
            *[number(read[stage], 1) for stage in READING_STAGES],
            *[number(None if (size := sizes[name]) is None else size[stage] / 1e6, 2) for stage in READING_STAGES],
        ]
        for name, read in counts.items()
    ]
    header = ["experts read a round", *READING_STAGES, *[f"{stage} MB" for stage in READING_STAGES]]
    return format_table(header, body, left=("experts read a round",))


def _identity(summary: Summary, varied: Sequence[str]) -> list[str]:
    """Return the cells that identify a run."""
    return [
        summary["choices"].get("drafter", ABSENT),
        summary["choices"].get("prune", ABSENT),
        str(summary["config"].get("drafter", {}).get("num_draft_tokens", ABSENT)),
        str(summary["config"].get("batch_size", ABSENT)),
        *(_sometimes(name, summary) for name in varied),
        describe_rule(summary).rule,
    ]


def _run_cells(run: Run, varied: Sequence[str], knobs: Sequence[str]) -> list[str]:
    summary = run.summary
    return [
        *_identity(summary, varied),
        *(ABSENT if (value := knob_value(summary, knob)) is None else str(value) for knob in knobs),
        number(summary["acceptance_length"]) + ("*" if summary["acceptance_imposed"] else ""),
        number(summary["decode_tokens_per_second"], 1),
        ratio_cell(over_reference(summary, summary, "plain")),
        _accuracy(summary, summary, summary["acceptance_imposed"]),
        _peak(summary),
        summary["status"],
        str(run.folder),
    ]


def _peak(summary: Summary) -> str:
    """Return the GPU's peak memory if the run used one, else that of the process."""
    memory = summary.get("memory")
    if memory is None:
        return ABSENT
    return gibibytes(memory["peak_rss_bytes"] if memory["peak_cuda_bytes"] is None else memory["peak_cuda_bytes"])


def _sometimes(name: str, summary: Summary) -> str:
    *groups, key = SOMETIMES[name]
    part: Mapping[str, Any] = reduce(lambda node, group: node.get(group, {}), groups, summary["config"])
    value = part.get(key)
    return ABSENT if value is None else str(value)


def _accuracy(part: Outcome, summary: Summary, is_imposed: bool) -> str:
    if is_imposed:
        return "imposed"
    return CUT if answers_cut(part, summary) else accuracy_cell(part["accuracy"])
