"""The workloads: a row for each."""

from __future__ import annotations

from pathlib import Path

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.option import WorkloadOption
from spec_lab.config import RunConfig

LOADER = "spec_lab.workloads.load"
A_FILE = {"path": "FILE"}
ONE_LENGTH = {"prompt_tokens": "8", "num_requests": "8"}


def file_exists(config: RunConfig) -> str | None:
    """The path is that of a file."""
    path = config.workload.path
    if path is None or Path(path).is_file():
        return None
    return f"workload.path={path} is no file; give the path of a JSON Lines file"


def tells_nothing(config: RunConfig) -> str | None:
    """Prompts that are no chats have nothing in front of them."""
    workload = config.workload
    return None if workload.system is None else f"workload.system is not read by workload={workload.name}; leave it out"


OPTIONS = (
    WorkloadOption(name="pocket", load=Deferred(LOADER, "pocket_requests")),
    WorkloadOption(name="generated", load=Deferred(LOADER, "generated_requests"), reads={"per_category": "20"}),
    WorkloadOption(name="jsonl", load=Deferred(LOADER, "jsonl_requests"), reads=A_FILE, refusals=(file_exists,)),
    WorkloadOption(
        name="spec_bench", load=Deferred(LOADER, "spec_bench_requests"), reads=A_FILE, refusals=(file_exists,)
    ),
    WorkloadOption(
        name="fixed_length",
        load=Deferred(LOADER, "fixed_length_requests"),
        reads=ONE_LENGTH,
        has_categories=False,
        refusals=(tells_nothing,),
    ),
    WorkloadOption(
        name="random_ids",
        load=Deferred(LOADER, "random_id_requests"),
        reads=ONE_LENGTH,
        has_categories=False,
        reads_text=False,
        refusals=(tells_nothing,),
    ),
)
