"""Handles Hydra's launchers that run jobs in other processes: joblib on this machine, submitit here or on a cluster.

If joblib would run more timed jobs at once than there are devices, it is refused before any job starts. A worker leases
the device of a timed job (`spec_lab.program.lease`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import BrokenExecutor
from importlib.util import find_spec
from typing import Any

from spec_lab.core.errors import UserError, one_line
from spec_lab.program.lease import CPU, visible_gpus

INSTALL = "pip install -c constraints.txt -e '.[launchers]'"
PLUGINS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
}


def refuse_missing_launcher(arguments: Iterable[str]) -> None:
    """Raise UserError if the package or the cluster of a requested launcher is missing."""
    for argument in arguments:
        key, _, option = argument.partition("=")
        plugin = PLUGINS.get(option) if key.lstrip("+") == "hydra/launcher" else None
        if plugin is not None and (find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{plugin}") is None):
            raise UserError(f"{argument} needs the package {plugin.replace('_', '-')}; {INSTALL}")
        if plugin is not None and option == "submitit_slurm" and shutil.which("srun") is None:
            raise UserError(
                f"{argument} starts jobs with srun, which is not installed here; use it on a machine of the cluster, "
                "or use hydra/launcher=basic"
            )


def refuse_launcher(arguments: Iterable[str], program: str) -> None:
    """Raise UserError if a launcher is requested for `program`, which has no jobs for one."""
    for argument in arguments:
        if argument.lstrip("+").startswith(("hydra/launcher", "hydra.launcher")):
            raise UserError(f"{argument}: {program} takes no launcher; leave it out (docs/use.md)")


def refuse_sharing(launcher: Mapping[str, Any], device: str) -> None:
    """Raise UserError if the launcher would run no job, or more jobs at a time than there are devices to time them on.

    The number of jobs at a time is only known for joblib. Submitit's jobs wait until a device of their machine is free.

    Args:
        launcher: Hydra's config node of that name.
        device: the device of jobs that do not set it themselves.
    """
    if launcher.get("n_jobs") == 0:
        raise UserError("hydra.launcher.n_jobs=0 runs no job; use hydra.launcher.n_jobs=1")
    num_workers = _num_workers(launcher.get("n_jobs"))
    gpus = [] if device == CPU else visible_gpus()
    num_devices = len(gpus) or 1
    if num_workers > num_devices:
        what = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}" if gpus else "one CPU"
        raise UserError(
            f"hydra.launcher.n_jobs={launcher['n_jobs']}: {num_workers} jobs at a time would disturb each other's "
            f"times on {what}; use hydra.launcher.n_jobs={num_devices}, or shared_device=true if no times are needed"
        )


def _num_workers(n_jobs: int | None) -> int:
    """Return how many jobs joblib runs at a time: -1 means the cores that it counts, -2 one less, and so on; 1 for
    None."""
    if n_jobs is None:
        return 1
    if n_jobs >= 0:
        return n_jobs
    from joblib import cpu_count  # heeds the affinity, a container's limit and LOKY_MAX_CPU_COUNT

    return max(1, int(cpu_count()) + 1 + n_jobs)


def launches_elsewhere(launcher: Mapping[str, Any]) -> bool:
    """Return whether jobs print to files of the launcher rather than to this terminal, as with submitit."""
    return "submitit" in launcher["_target_"]


def lost_worker(error: BaseException) -> str | None:
    """Return the message if the launcher raised the error, mostly since a worker died; None for other errors."""
    if isinstance(error, BrokenExecutor) or type(error).__module__.startswith("submitit"):
        return one_line(str(error).partition("\n")[0]) or type(error).__name__
    return None
