"""Turns a record into what W&B receives: tags, configuration, tables, and copies of the files.

None of it says who ran it or where.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lab.core.errors import without_folders
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.schema import Origin, Summary
from spec_lab.record.sinks import CONFIG_FILE, REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE, write_config, write_json

ENVIRONMENT_FILE = "environment.json"
LONGEST_TAG = 64
NOT_FACTORS = ("logger", "size", "debug")
UNNAMED = ("drafter.num_draft_tokens", "batch_size", "kernels", "verify.budget", "recurrent.rollback")
"""Knobs that a study or a sweep may vary, but that are in no group's tag."""
NOT_RESULTS = ("config", "versions", "choices", "definitions")
"""Keys of a record that are not results; W&B has them in its config and in the files."""
REQUEST_COLUMNS = (
    "id", "category", "rounds", "acceptance_length_all", "output_tokens", "finish_reason", "correct", "divergence",
    "text", "acceptance_imposed",
)  # fmt: skip
KERNEL_COLUMNS = ("name", "calls_per_round", "us_per_round")


def tags_of(summary: Summary) -> list[str]:
    """Return a tag for each factor, such as `drafter=eagle3` or `batch_size=8`, by which W&B can filter and group.

    A group's tag has its name from `spec_lab.app.labels`. Knobs in `UNNAMED` have tags of their own.
    """
    factors = {group: name for group, name in summary["choices"].items() if group not in NOT_FACTORS}
    for key in UNNAMED:
        *groups, leaf = key.split(".")
        part: Any = summary["config"]
        for group in groups:
            part = part.get(group, {})
        if part.get(leaf) is not None:
            factors[key] = str(part[leaf])
    return [f"{name}={value}"[:LONGEST_TAG] for name, value in factors.items()]


def results_of(summary: Summary) -> dict[str, Any]:
    """Return all of `summary.json` except `NOT_RESULTS`."""
    return {key: value for key, value in without_user_paths(summary).items() if key not in NOT_RESULTS}


def request_cells(row: RequestRow) -> list[Any]:
    """Return the cells of a request for `REQUEST_COLUMNS`, without the last, which is the same for the whole run."""
    rounds = len(row["emitted_per_round"])
    divergence = row["divergence"]
    return [
        row["id"],
        row["category"],
        rounds,
        sum(row["emitted_per_round"]) / rounds if rounds else None,
        len(row["output_ids"]),
        row["finish_reason"],
        row["correct"],
        None if divergence is None else divergence["kind"],
        row["text"],
    ]


def kernel_cells(summary: Summary) -> list[list[Any]]:
    """Return a line for each kernel of the profiled rounds, with the cells of `KERNEL_COLUMNS`."""
    return [[kernel["name"], kernel["calls_per_round"], kernel["us_per_round"]] for kernel in summary["kernels"]]


def copy_files(folder: Path, copies: Path, summary: Summary) -> Sequence[Path]:
    """Copy the record of the run in `folder` to `copies`, without the user's paths and without traces."""
    copies.mkdir(parents=True, exist_ok=True)
    clean = without_user_paths(summary)
    write_json(copies / SUMMARY_FILE, clean)
    write_config(copies / CONFIG_FILE, clean["config"])
    write_json(copies / ENVIRONMENT_FILE, environment_of(clean))
    for name in (REQUESTS_FILE, ROUNDS_FILE):
        shutil.copyfile(folder / name, copies / name)
    return sorted(copies.iterdir())


def environment_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions, the revision, the device and the choices of a run."""
    keys = Origin.__annotations__.keys() - {"config", "name", "started_at"}
    return {"extensions": {}} | {key: summary[key] for key in sorted(keys) if key in summary}


def wandb_config(summary: Summary) -> dict[str, Any]:
    """Return the resolved config, with the run's versions and device under the additional key `origin`."""
    return without_user_paths(summary["config"]) | {"origin": environment_of(summary)}


def without_user_paths(value: Any) -> Any:
    """Return a copy in which no value has an absolute path, which would show where the user's files are.

    A string that is an absolute path keeps its last part. Inside other strings the home and the working directory
    become `~` and `.`, and any other absolute path keeps its last part.
    """
    if isinstance(value, Mapping):
        return {key: without_user_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_user_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if Path(value).is_absolute():
        return Path(value).name
    # The longer one is replaced first, since the working directory is often inside the home.
    places = {str(Path.cwd()): ".", str(Path.home()): "~"}
    for place in sorted(places, key=len, reverse=True):
        value = value.replace(place, places[place]) if place != os.sep else value
    return without_folders(value)
