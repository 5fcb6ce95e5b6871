"""The workloads: a row for each."""

from __future__ import annotations

from pathlib import Path

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.option import CheckerOption, WorkloadOption
from spec_lab.config import RunConfig
from spec_lab.workloads import checkers

LOADER = "spec_lab.workloads.load"
A_FILE = {"path": "FILE"}
ONE_LENGTH = {"prompt_tokens": "8", "num_requests": "8"}


def file_exists(config: RunConfig) -> str | None:
    """The path is that of a file."""
    path = config.workload.path
    if path is None or Path(path).is_file():
        return None
    return f"workload.path={path} is no file; give the path of a JSON Lines file"


OPTIONS = (
    WorkloadOption(name="pocket", load=Deferred(LOADER, "pocket_requests")),
    WorkloadOption(name="generated", load=Deferred(LOADER, "generated_requests"), reads={"per_category": "20"}),
    WorkloadOption(name="jsonl", load=Deferred(LOADER, "jsonl_requests"), reads=A_FILE, refusals=(file_exists,)),
    WorkloadOption(
        name="spec_bench", load=Deferred(LOADER, "spec_bench_requests"), reads=A_FILE, refusals=(file_exists,)
    ),
    WorkloadOption(
        name="fixed_length", load=Deferred(LOADER, "fixed_length_requests"), reads=ONE_LENGTH, has_categories=False
    ),
    WorkloadOption(
        name="random_ids",
        load=Deferred(LOADER, "random_id_requests"),
        reads=ONE_LENGTH,
        has_categories=False,
        reads_text=False,
    ),
)

CHECKERS = (
    CheckerOption(name="answer", read=checkers.read_line, same=checkers.same_words),
    CheckerOption(name="last_number", read=checkers.read_number, same=checkers.same_number),
    CheckerOption(name="boxed", read=checkers.read_box, same=checkers.same_formula),
    CheckerOption(name="choice", read=checkers.read_choice, same=checkers.same_choice),
    CheckerOption(name="exact", read=checkers.read_all, same=checkers.same_text),
)
