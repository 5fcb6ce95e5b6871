"""Records where a run's numbers come from: versions, revision, machine; no host name, user name, command or path."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_lab.record.models import Machine

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"),
    *("pydantic", "hydra-core", "omegaconf", "wandb"),
)
GIT_TIMEOUT_SECONDS = 5


def machine_of(device: str | None = None, **known: Any) -> Machine:
    """Describe this process and machine, without network.

    Args:
        device: as torch spells it; None before anything is loaded.
        known: further fields.
    """
    from spec_lab.core.version import VERSION
    from spec_lab.record.models import Machine

    versions: dict[str, str | None] = {"spec_lab": VERSION, "python": platform.python_version()}
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    for package in PACKAGES:
        versions[package] = None
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    name = None if device is None else cpu_model()
    if device is not None and device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(torch.device(device))
    return Machine(
        versions=versions,
        git_revision=git_revision(),
        cpu_model=cpu_model(),
        device=device,
        device_name=name,
        **known,
    )


def origins(extensions: Iterable[ModuleType]) -> dict[str, dict[str, str | None]]:
    """Return version and git revision of each extension, by the name of its module."""
    found: dict[str, dict[str, str | None]] = {}
    for module in extensions:
        file = Path(module.__file__ or "").resolve()
        distributions = metadata.packages_distributions().get(module.__name__.partition(".")[0], [])
        version = metadata.version(distributions[0]) if distributions else getattr(module, "__version__", None)
        found[module.__name__] = {"version": version, "revision": git_revision(file.parent, file.name)}
    return found


def git_revision(folder: Path | None = None, tracked: str = "__init__.py") -> str | None:
    """Return the commit of the checkout that `folder` (default: this package) is tracked in, with `+dirty` for local
    changes; None outside a checkout.

    `tracked` is a file in the folder that git must track, since a package in a virtual environment inside an unrelated
    repository would get that repository's commit.
    """
    folder = folder or Path(__file__).resolve().parents[1]
    if _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ":/")
    return None if commit is None else commit + ("+dirty" if changes else "")


def cpu_model() -> str:
    """Return the processor's name according to the system, or its architecture if that is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _git(folder: Path, *arguments: str) -> str | None:
    # A git hook that starts this process sets GIT_DIR and GIT_INDEX_FILE, with which git would describe the hook's
    # repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
