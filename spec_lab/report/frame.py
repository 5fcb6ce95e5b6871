"""Any set of runs as one tidy data frame, for notebooks and for `python -m spec_lab.report --csv`.

    from spec_lab.report.frame import load_frame

    frame = load_frame(["outputs/drafters-sweep-1a2b3c4d", "outputs/run-pocket-eagle3-strict-catchup-eager-5e6f7a8b"])
    frame[frame["part"] == "this run"].plot.scatter("break_even_acceptance_length", "acceptance_length")

A row is a part of a run: the run itself, or a reference that was measured with it (`plain`, `unpruned`,
`eager`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spec_lab.core.errors import UserError
from spec_lab.record.paired import PairedRatio, Reference, over_reference
from spec_lab.record.runs import Run, find_runs, folder_of
from spec_lab.record.schema import READING_STAGES, THIS_RUN, Outcome, Ratio, Speed, Summary
from spec_lab.record.time_metrics import STAGES, paired_ratio
from spec_lab.report.differing import differing_knobs, knobs_of
from spec_lab.report.prompts import prompts_id

if TYPE_CHECKING:
    import pandas as pd

PLAIN: Reference = "plain"


class Column(NamedTuple):
    """The type of a column's values, any of which may be missing, and their meaning."""

    kind: Literal["text", "number", "count", "flag"]
    meaning: str


COLUMNS: dict[str, Column] = {
    "folder": Column("text", "of the run"),
    "part": Column("text", "`this run`, or the name of a reference that was measured with it"),
    "name": Column("text", "the user's name for the run"),
    "status": Column("text", "finished, failed, refused or interrupted; only a finished run has results"),
    "reason": Column("text", "why it did not finish"),
    "started_at": Column("text", "UTC, ISO 8601"),
    "schema_version": Column("count", "of the record; other versions may define numbers differently"),
    "prompts": Column("text", "the same for runs over the same prompts; missing for unfinished or unreadable runs"),
    "num_draft_tokens": Column("count", "K; 0 for plain decoding"),
    "batch_size": Column("count", "largest number of requests in a round"),
    "temperature": Column("number", "of the sampling; 0 is greedy"),
    "seed": Column("count", "of the run"),
    "repeats": Column("count", "number of timed passes; rates and times are medians over them"),
    "requests": Column("count", "of the workload"),
    "rounds": Column("count", "request rounds"),
    "emitted_tokens": Column("count", "emitted in rounds"),
    "output_tokens": Column("count", "all tokens, including those of prompt passes"),
    "acceptance_length": Column("number", "tokens that a request round emits in a text that does not end"),
    "acceptance_length_all": Column("number", "emitted tokens / request rounds, after any cut"),
    "acceptance_imposed": Column("flag", "whether the rule imposes acceptance, which is then no result"),
    "acceptance_lossless": Column("flag", "whether the rule promises the target's distribution"),
    "equal_to_plain": Column("number", "share of outputs that are plain decoding's"),
    "decode_tokens_per_second": Column("number", "median over repeats"),
    "decode_tokens_per_second_low": Column("number", "of the slowest repeat"),
    "decode_tokens_per_second_high": Column("number", "of the fastest repeat"),
    "end_to_end_tokens_per_second": Column("number", "prompt passes included"),
    "speedup": Column("number", "decode rate over plain decoding's, paired by repeat: median"),
    "speedup_low": Column("number", "lowest of the repeats"),
    "speedup_high": Column("number", "highest of the repeats"),
    "speedup_mean": Column("number", "geometric mean of the same ratio over turns"),
    "speedup_mean_low": Column("number", "lower end of its 95 % interval, from three turns on"),
    "speedup_mean_high": Column("number", "upper end of the same interval"),
    "break_even_acceptance_length": Column(
        "number", "length from which drafting pays: time of a request round / of a plain one"
    ),
    "predicted_speedup": Column("number", "acceptance_length / break_even_acceptance_length"),
    "pruning_speedup": Column("number", "decode rate over that of the run without pruning: median"),
    "pruning_speedup_low": Column("number", "lowest of the repeats"),
    "pruning_speedup_high": Column("number", "highest of the repeats"),
    "pruning_speedup_mean": Column("number", "geometric mean of the same ratio over turns"),
    "pruning_speedup_mean_low": Column("number", "lower end of its 95 % interval, from three turns on"),
    "pruning_speedup_mean_high": Column("number", "upper end of the same interval"),
    "round_ms": Column("number", "mean time of a round"),
    "launch_ms": Column("number", "from the host's first call of the launch until all of a round is launched"),
    **{f"{stage}_ms": Column("number", f"mean time of the stage {stage} in a round") for stage in STAGES},
    "prefill_ms_per_request": Column("number", "mean time of a prompt pass"),
    "ttft_p50_ms": Column("number", "median time to the first token"),
    "e2e_p50_ms": Column("number", "median time of a request"),
    "drafted": Column("count", "drafts that were made, offered or not"),
    "offered": Column("count", "drafts that verification could accept"),
    "verified": Column("count", "rows of the target's verify"),
    "catchup_computed": Column("count", "rows of the catch-up step carried past the KV write"),
    "catchup_live": Column("count", "of these, rows whose output is read"),
    "prefill_hidden": Column("count", "prompt rows whose features the drafter got from the target"),
    "prefill_logits": Column("count", "prompt rows for which the target computed logits"),
    "prefill_shared": Column("count", "prompt rows that entered the target's layers that only read KV"),
    **{f"experts_read_{stage}": Column("number", f"different experts a round, in {stage}") for stage in READING_STAGES},
    **{f"expert_bytes_read_{stage}": Column("number", f"bytes of them, in {stage}") for stage in READING_STAGES},
    "launches_per_round": Column("number", "device work that the host submits"),
    "gpu_idle_share": Column("number", "of a round's time"),
    "accuracy": Column("number", "share of right answers"),
    "accuracy_low": Column("number", "lower end of its 95 % interval"),
    "accuracy_high": Column("number", "upper end of its 95 % interval"),
    "accuracy_n": Column("count", "answers that were checked"),
    "total_variation": Column("number", "mean distance of a token's distribution from the target's"),
    "kl": Column("number", "mean KL of the same, in nats"),
    "relaxed_per_1000_tokens": Column("number", "accepted drafts that were not the argmax"),
    "thinking_tokens": Column("number", "mean over requests"),
    "kernels": Column("text", "the option of `kernels`, as the user named it or `auto` chose it"),
    "auto": Column("text", "the knobs among attention, kernels and graph that `auto` chose"),
    "device": Column("text", "such as cpu, cuda or cuda:1"),
    "device_name": Column("text", "the system's name for it"),
    "dtype": Column("text", "that the run computes in"),
    "num_threads": Column("count", "threads of torch on the CPU"),
    "peak_rss_bytes": Column("count", "peak memory of the process"),
    "peak_cuda_bytes": Column("count", "peak memory allocated on the GPU"),
    "git_revision": Column("text", "of this package"),
}
"""The frame always has these columns. Depending on the runs, it also has, in this order:

- in alphabetical order, the labels (`drafter`, `target`, ...), a column `NAME_ms` for each stage of an extension, and
  each differing knob whose name has no dot;
- a column for each other knob in which the runs differ, by its dotted name (`drafter.offset`), including those of
  extensions;
- `accepted_at_1` and so on, the share of rounds that accept the draft at that position, and `accepted_at_1_if_reached`:
  of the drafts that were offered there and whose earlier drafts were all accepted, the share that was accepted too;
- `metric_NAME`, the numbers of an extension's metrics;
- `kernel_NAME_us`, a kernel's time per round, the mean of the profiled rounds;
- `version_torch` and so on."""

FIGURES = ("accepted_at_", "metric_", "kernel_")
"""Prefixes of further columns that hold numbers."""
PANDAS_TYPES = {"text": "object", "number": "float64", "count": "Int64", "flag": "boolean"}


def load_frame(folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> pd.DataFrame:
    """Return one row for each part of each run in the folders and below them, oldest run first. `COLUMNS` explains the
    columns.

    Records of older schema versions are read too. A record that cannot be read is left out with a warning.

    Raises:
        UserError: no folder is named, or one is missing or has no run.
    """
    several = isinstance(folders, Iterable) and not isinstance(folders, str | bytes)
    named = [folder_of(folder) for folder in (folders if several else [folders])]  # type: ignore[union-attr, arg-type]
    if not named:
        raise UserError("load_frame([]) names no folder; use one such as load_frame('outputs')")
    return frame_of(find_runs(named))


def frame_of(runs: Iterable[Run]) -> pd.DataFrame:
    """Do the same as `load_frame`, for runs that have already been read."""
    import pandas as pd

    runs = list(runs)
    knobs = differing_knobs([run.summary["config"] for run in runs])
    rows = [row for run in runs for row in _rows(run, knobs)]
    extra = sorted({name for row in rows for name in row} - COLUMNS.keys(), key=_extra_order)
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *extra])
    kinds = {name: PANDAS_TYPES[column.kind] for name, column in COLUMNS.items()}
    kinds |= {name: "float64" if name.startswith(FIGURES) or name.endswith("_ms") else "object" for name in extra}
    return frame.astype(kinds)


def _extra_order(name: str) -> tuple[int, int, str]:
    """Return the sort key that puts names without a dot first (labels, stages, some knobs), then other knobs, positions
    by number, metrics, kernels, versions."""
    prefixes = ("version_", "kernel_", "metric_", "accepted_at_")
    kinds = [len(prefixes) - place for place, prefix in enumerate(prefixes) if name.startswith(prefix)]
    position = re.search(r"\d+", name) if name.startswith("accepted_at_") else None
    return max(kinds, default=int("." in name) - 1), int(position[0]) if position else 0, name


def _rows(run: Run, knobs: Sequence[str]) -> list[dict[str, Any]]:
    summary = run.summary
    own = knobs_of(summary["config"])
    shared = {**{knob: own.get(knob) for knob in knobs if knob not in COLUMNS}, **_labels(summary), **_origin(run)}
    parts: dict[str, Any] = {THIS_RUN: summary, **summary["references"]}
    return [{**shared, "part": name, **_of_part(name, part, summary)} for name, part in parts.items()]


def _labels(summary: Summary) -> dict[str, Any]:
    versions = {f"version_{package}": version for package, version in summary["versions"].items()}
    choices = {f"label_{name}" if name in COLUMNS else name: choice for name, choice in summary["choices"].items()}
    return choices | versions


def _origin(run: Run) -> dict[str, Any]:
    summary = run.summary
    same: tuple[Any, ...] = (
        "name", "status", "reason", "started_at", "schema_version", "acceptance_imposed", "acceptance_lossless",
        "device", "device_name", "dtype", "num_threads", "git_revision",
    )  # fmt: skip
    sampling = summary["config"].get("sampling")
    memory: Mapping[str, Any] = summary.get("memory") or {}
    return {
        "folder": str(run.folder),
        **{key: summary[key] for key in same},  # type: ignore[literal-required]
        "prompts": prompts_id(run),
        "batch_size": summary["config"].get("batch_size"),
        "temperature": _number(sampling.get("temperature")) if isinstance(sampling, dict) else None,
        "seed": _count(summary["config"].get("seed")),
        "kernels": summary["config"].get("kernels"),
        "auto": " ".join(summary["config"].get("auto", [])) or None,
        "peak_rss_bytes": memory.get("peak_rss_bytes"),
        "peak_cuda_bytes": memory.get("peak_cuda_bytes"),
    }


def _of_part(name: str, part: Any, summary: Summary) -> dict[str, Any]:
    is_main, num_draft_tokens = name == THIS_RUN, summary["num_draft_tokens"]
    values = {**_outcome(part), **_speed(part), "num_draft_tokens": 0 if name == PLAIN else num_draft_tokens}
    if name != PLAIN:
        values |= _ratio("speedup", summary["speedup"] if is_main else _over_plain(part, summary))
        values |= _paired("speedup_mean", over_reference(part, summary, PLAIN))
    if is_main:
        latency = summary["latency_ms"]
        values |= _ratio("pruning_speedup", summary["pruning_speedup"])
        values |= _paired("pruning_speedup_mean", over_reference(part, summary, "unpruned"))
        values |= {
            "break_even_acceptance_length": summary["break_even_acceptance_length"],
            "predicted_speedup": predicted_speedup(summary),
            "launches_per_round": summary["launches_per_round"],
            "gpu_idle_share": summary["gpu_idle_share"],
            "ttft_p50_ms": latency["ttft"]["p50"],
            "e2e_p50_ms": latency["e2e"]["p50"],
            **{f"kernel_{kernel['name']}_us": kernel["us_per_round"] for kernel in summary["kernels"]},
        }
    return values


def predicted_speedup(summary: Summary) -> float | None:
    """Return acceptance length over break-even acceptance length."""
    length, break_even = summary["acceptance_length"], summary["break_even_acceptance_length"]
    return length / break_even if length is not None and break_even else None


def _outcome(part: Outcome) -> dict[str, Any]:
    accuracy, relaxed, thinking = part["accuracy"], part["relaxed"], part["thinking"]
    distance, rates = part.get("distance"), part["acceptance_rate_by_position"]
    return {
        "requests": part["num_requests"],
        "rounds": part["rounds"],
        "emitted_tokens": part["emitted_tokens"],
        "output_tokens": part["output_tokens"],
        "acceptance_length": part["acceptance_length"],
        "acceptance_length_all": part["acceptance_length_all"],
        "equal_to_plain": part["equal_to_plain"],
        "accuracy": accuracy["value"],
        "accuracy_low": accuracy["low"],
        "accuracy_high": accuracy["high"],
        "accuracy_n": accuracy["n"],
        "total_variation": None if distance is None else distance["total_variation"],
        "kl": None if distance is None else distance["kl"],
        "relaxed_per_1000_tokens": None if relaxed is None else relaxed["per_1000_tokens"],
        "thinking_tokens": None if thinking is None else thinking["mean_tokens"],
        **{f"accepted_at_{place}": rate for place, rate in enumerate(rates["unconditional"], start=1)},
        **{f"accepted_at_{place}_if_reached": rate for place, rate in enumerate(rates["conditional"], start=1)},
    }


def _speed(part: Speed) -> dict[str, Any]:
    rates = [rate for repeat in part["repeats"] if (rate := repeat["decode_tokens_per_second"]) is not None]
    stages: Mapping[str, float | None] = part["stage_ms_per_round"]
    return {
        "repeats": len(part["repeats"]),
        "decode_tokens_per_second": part["decode_tokens_per_second"],
        "decode_tokens_per_second_low": min(rates, default=None),
        "decode_tokens_per_second_high": max(rates, default=None),
        "end_to_end_tokens_per_second": part["end_to_end_tokens_per_second"],
        "round_ms": part["round_ms"],
        "launch_ms": part["launch_ms"],
        **{f"{stage}_ms": milliseconds for stage, milliseconds in stages.items()},
        "prefill_ms_per_request": part["prefill_ms_per_request"],
        **{f"metric_{name}": value for name, value in part.get("metrics", {}).items()},
        **part["rows"],
        **{f"experts_read_{stage}": count for stage, count in (part.get("experts_read") or {}).items()},
        **{f"expert_bytes_read_{stage}": count for stage, count in (part.get("expert_bytes_read") or {}).items()},
    }


def _over_plain(part: Speed, summary: Summary) -> Ratio | None:
    plain = summary["references"].get(PLAIN)
    if plain is None:
        return None
    rates, others = ([repeat["decode_tokens_per_second"] for repeat in speed["repeats"]] for speed in (part, plain))
    return paired_ratio(rates, others, over=PLAIN)


def _ratio(name: str, ratio: Ratio | None) -> dict[str, float | None]:
    if ratio is None:
        return {}
    return {name: ratio["value"], f"{name}_low": ratio["low"], f"{name}_high": ratio["high"]}


def _paired(name: str, ratio: PairedRatio | None) -> dict[str, float | None]:
    if ratio is None:
        return {}
    low, high = ratio.ends
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}


def _number(value: Any) -> float | None:
    """Return a setting's value as a number; None if it is not one, since reading a record does not check this."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None
