"""The frame of recorded runs: a row for each configuration of each run, and a column for each choice, knob and number.

    frame(find_runs("outputs"))        # one row a part: the run, then its references

Columns: `run` (from 1), `part`, `folder`, `status`, `name`; a group's choice by the group's name, a knob and
a number by their dotted names (`drafter.num_draft_tokens`, `latency_ms.ttft.p99`); `K`, `line` of a study, and
`machine.device_name`, `target.digest` and their kin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from spec_lab.record.metric import flattened
from spec_lab.record.models import Part, Run
from spec_lab.record.names import THIS_RUN
from spec_lab.record.reading import Found, find_runs, read_requests
from spec_lab.record.statistics import Interval

BESIDE_THE_RUN = (
    *("output_dir", "dry_run", "leave_out", "shared_device", "auto", "extensions", "references", "fixed_k"),
    *("logger", "name", "record", "profile_rounds", "study", "size", "objective"),
)
"""Keys that say how a run is started, and what it records. They do not change what it decodes."""
DRAFT_STAGES = ("catchup", "recur", "draft", "lookup")
"""The stages that are a drafter's alone."""
SHORT_REVISION = 7
EVERY_CATEGORY = "(all)"
"""The name of all categories together, which is in brackets since a workload may have a category named "all"."""
PROVENANCE: Mapping[str, str] = {
    "target": "target",
    "target.digest": "weights",
    "target.template": "template",
    "thinking": "thinking",
    "target.dtype": "dtype",
    "drafter": "drafter",
    "K": "K",
    "acceptance": "rule",
    "prune": "prune",
    "tree": "tree",
    "graph": "graph",
    "kernels": "kernels",
    "attention": "attention",
    "sampler": "sampler",
    "max_new_tokens": "new tokens",
    "batch_size": "batch",
    "num_requests": "prompts",
    "repeats": "repeats",
    "device": "device",
    "engine": "engine",
    "versions.torch": "torch",
    "revision": "revision",
    "date": "date",
}
"""The columns that say where a row's numbers come from, with their headers."""


def frame(runs: Iterable[Found]) -> pd.DataFrame:
    """Return a row for each part of each run, the run itself first."""
    rows = [row for number, found in enumerate(runs, start=1) for row in _rows(number, found)]
    return pd.DataFrame(rows)


def load_frame(folders: Path | str | Sequence[Path | str]) -> pd.DataFrame:
    """Return the frame of the runs in and below some folders."""
    return frame(find_runs(folders))


def own(runs: pd.DataFrame, finished: bool = True) -> pd.DataFrame:
    """Return the rows of the runs themselves, without their references."""
    rows = runs[runs["part"] == THIS_RUN]
    return rows[rows["status"] == "finished"] if finished else rows


def requests_frame(found: Found) -> pd.DataFrame:
    """Return a row for each request of a run, with its rounds and tokens a round."""
    rows = pd.json_normalize([request.model_dump() for request in read_requests(found.folder)])
    if not rows.empty and rows["emitted_per_round"].notna().all():
        rows["rounds"] = rows["emitted_per_round"].map(len)
        emitted = rows["emitted_per_round"].map(sum)
        rows["acceptance_length_all"] = emitted / rows["rounds"].where(rows["rounds"] > 0)
    return rows


def categories_frame(run: Run) -> pd.DataFrame:
    """Return a row for each category of a run, that with the lowest acceptance length first."""
    rows = [{"category": name, **numbers} for name, numbers in run.by_category.items()]
    return pd.DataFrame(rows).sort_values("acceptance_length", ignore_index=True) if rows else pd.DataFrame()


def positions_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """Return acceptance rates in long form: by run, position (from 1) and kind."""
    return _long(runs, "acceptance_rate_by_position", ("kind", "position"), "rate").astype({"position": int})


def lengths_by_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """Return acceptance lengths in long form, by what they are told by (`context`, `turn`, `phase`)."""
    return _long(runs, "acceptance_length_by", ("by", "of"), "acceptance length")


def labels(runs: pd.DataFrame) -> pd.Series:
    """Return a name for each row: its study's line if it has one, with the choices and knobs in which the runs (of
    a line) differ, else the drafter."""
    knobs = [name for name in varied(runs) if name not in ("line", "size", "experiment")]
    if "line" in runs and runs["line"].notna().all():
        lines = [part for _, part in own(runs, finished=False).groupby("line")]
        knobs = ["line", *(name for name in knobs if any(part[name].map(repr).nunique() > 1 for part in lines))]
    words = [runs[name].map(lambda value, name=name: _word(name, value, runs)) for name in knobs]
    if not words:
        return runs.get("drafter", runs["name"])
    return pd.concat(words, axis=1).agg(lambda row: ", ".join(word for word in row if word), axis=1)


def varied(runs: pd.DataFrame) -> list[str]:
    """Return the groups and knobs in which runs differ, groups first. A knob of a group's option counts only where runs
    with the same option differ in it."""
    rows = own(runs, finished=False)
    names = dict.fromkeys(name for names in rows["settings"] for name in names if name in rows)
    groups = {name for name in names if "." not in name and any(other.startswith(f"{name}.") for other in names)}

    def differs(name: str) -> bool:
        if name in groups or name.partition(".")[0] not in groups:
            return bool(rows[name].map(repr).nunique() > 1)
        parts = rows.groupby(rows[name.partition(".")[0]].map(repr))[name]
        return any(part.map(repr).nunique() > 1 for _, part in parts)

    return [name for name in names if name.removesuffix(".name") not in groups - {name} and differs(name)]


def provenance(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of `PROVENANCE` that the runs have, under their headers."""
    names = {name: header for name, header in PROVENANCE.items() if name in runs}
    return runs[list(names)].rename(columns=names)


def _word(name: str, value: Any, runs: pd.DataFrame) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    if "." not in name and isinstance(value, str):
        return value
    head = "K" if name == "drafter.num_draft_tokens" else name.rpartition(".")[2]
    return f"{head}={f'{value:g}' if isinstance(value, float) else value}"


def _rows(number: int, found: Found) -> Iterable[dict[str, Any]]:
    run = found.run
    config = {key: value for key, value in run.config.items() if key not in BESIDE_THE_RUN}
    knobs = pd.json_normalize(config).iloc[0].to_dict() if config else {}
    knobs = {key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in knobs.items()}
    sampled = {name: value for name, value in run.sampling.items() if value} if run.sampling.get("temperature") else {}
    shared = {
        **knobs,
        **run.choices,
        "settings": (*run.choices, *knobs),
        "run": number,
        "folder": str(found.folder),
        "status": run.status,
        "name": run.name,
        "line": run.choices.get("line"),
        "started_at": run.started_at,
        "date": run.started_at[:10],
        "imposed": run.acceptance_imposed,
        "lossless": run.acceptance_lossless,
        "engine": run.engine,
        "thinking": run.thinking,
        "revision": short(run.machine.git_revision) or f"release {run.engine_version}",
        "device": device_of(run),
        "sampler": " ".join(f"{name}={value:g}" for name, value in sampled.items()) or "greedy",
        **{f"target.{key}": value for key, value in run.target.model_dump().items() if key not in ("name", "weights")},
        **{f"versions.{name}": version for name, version in run.machine.versions.items()},
    }
    for name, part in run.parts.items():
        drafter = {"drafter": "none", "drafter.name": "none"} if name == "plain" else {}
        yield {**shared, **drafter, "part": name, "K": part.num_draft_tokens, **part.metrics, **_derived(part)}


def _derived(part: Part) -> dict[str, Any]:
    """Return numbers that tables want and that follow from others."""
    rounds = part["rounds"]
    drafting = draft_ms(part.metrics)
    cost = {
        "cost.draft": in_plain_steps(part.metrics, drafting),
        "cost.verify": in_plain_steps(part.metrics, part["stage_ms_per_round.verify"]),
    }
    even = part["break_even_acceptance_length"]
    cost["cost.rest"] = None if even is None else even - sum(value or 0.0 for value in cost.values())
    a_round = {
        f"{name}_a_round": part[f"rows.{name}"] / rounds if rounds and part[f"rows.{name}"] is not None else None
        for name in ("drafted", "offered", "verified")
    }
    length = part["acceptance_length"]
    predicted = length / even if length is not None and even else None
    each = part["acceptance_length_all"] or (1.0 if rounds else None)
    user = 1e3 * each / part["round_ms"] if each and part["round_ms"] else None
    share = drafting / part["round_ms"] if drafting is not None and part["round_ms"] else None
    return {
        **cost,
        **a_round,
        "tokens_per_second_a_user": user,
        "drafter_share": share,
        "repeats": len(part.repeats),
        "predicted_speedup": predicted,
    }


def draft_ms(numbers: Mapping[str, Any]) -> float | None:
    """Return the time of the drafter in a round; None if none of its stages could be timed separately."""
    known = [ms for stage in DRAFT_STAGES if (ms := numbers.get(f"stage_ms_per_round.{stage}")) is not None]
    return sum(known) if known else None


def in_plain_steps(numbers: Mapping[str, Any], milliseconds: float | None) -> float | None:
    """Return a part of a round's time, in units of a plain step's time; None if one of the times is unknown.

    A round serves a batch. So the part's fraction of the round is multiplied by the cost of a request round.
    """
    even, of_round = numbers.get("break_even_acceptance_length"), numbers.get("round_ms")
    return milliseconds * even / of_round if milliseconds is not None and even and of_round else None


def ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return the columns of a value and its interval; none without a value."""
    return {} if interval is None else dict(flattened(name, asdict(interval)))


def short(revision: str | None) -> str:
    """Return the first digits of a commit, and whether there were local changes."""
    commit, dirty, _ = (revision or "").partition("+dirty")
    return commit[:SHORT_REVISION] + dirty


def device_of(run: Run) -> str:
    """Return the device of a run, with the number of threads of a CPU or of processes."""
    machine = run.machine
    if (machine.device or "").startswith("cpu"):
        return f"{machine.device_name}, {machine.num_threads} thread{'s' * (machine.num_threads != 1)}"
    several = f"{machine.world_size} x " if (machine.world_size or 1) > 1 else ""
    return f"{several}{machine.device_name or 'unknown'}"


def _long(runs: pd.DataFrame, metric: str, levels: tuple[str, str], value: str) -> pd.DataFrame:
    """Return the numbers `metric.A.B` of the runs, a row each, with A and B as columns."""
    rows = own(runs)
    names = [name for name in rows if name.startswith(f"{metric}.") and name.count(".") == 2]
    named = rows[names].assign(label=labels(rows), run=rows["run"])
    long = named.melt(id_vars=["label", "run"], value_vars=names, var_name="name", value_name=value).dropna(
        subset=value
    )
    parts = long["name"].str.split(".", expand=True)
    return long.assign(**{levels[0]: parts[1], levels[1]: parts[2]}).drop(columns="name").reset_index(drop=True)
