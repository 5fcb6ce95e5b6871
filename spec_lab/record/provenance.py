"""Records where a run's numbers come from: versions, revision, machine.

It collects nothing private, so nothing needs redacting: no environment, host name, user name, command line or path.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from spec_lab.record.schema import ExtensionOrigin

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "hydra-core",
    "omegaconf",
    "wandb",
)
GIT_TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Provenance:
    """The machine and versions of a run. `device_name` is that of the accelerator, or of the CPU for a run on one.

    Before anything is loaded (a refused run) the device, dtypes and threads are unknown: None.
    """

    versions: dict[str, str | None]
    git_revision: str | None
    cpu_model: str
    device: str | None
    device_name: str | None
    dtype: str | None
    num_threads: int | None
    extensions: dict[str, ExtensionOrigin] = field(default_factory=dict)
    world_size: int | None = None
    weight_dtype: str | None = None
    stored_types: list[str] | None = None
    template: str | None = None
    target_digest: str | None = None
    thinking_markers: bool | None = None


def collect_provenance(
    device: str | None = None,
    dtype: str | None = None,
    num_threads: int | None = None,
    extensions: Mapping[str, ExtensionOrigin] | None = None,
    world_size: int | None = None,
    weight_dtype: str | None = None,
    stored_types: list[str] | None = None,
    template: str | None = None,
    target_digest: str | None = None,
    thinking_markers: bool | None = None,
) -> Provenance:
    """Collect the provenance from this process and machine, without network.

    Args:
        device: as torch spells it, such as `cpu`, `cuda` or `cuda:1`.
        extensions: modules outside this package that added options, by name.
        world_size: how many processes the run has.
        weight_dtype: type in which weights of the products in the target's layers are stored.
        stored_types: the types in a GGUF file; None for other files.
        template: digest of the chat template, twelve digits; `none` if there is none.
        target_digest: digest of the target's files, twelve digits.
        thinking_markers: whether the tokenizer has tokens that begin and end thinking.
    """
    return Provenance(
        versions=package_versions(),
        git_revision=git_revision(),
        cpu_model=cpu_model(),
        device=device,
        device_name=None if device is None else device_name(device),
        dtype=dtype,
        num_threads=num_threads,
        extensions=dict(extensions or {}),
        world_size=world_size,
        weight_dtype=weight_dtype,
        stored_types=stored_types,
        template=template,
        target_digest=target_digest,
        thinking_markers=thinking_markers,
    )


def package_versions() -> dict[str, str | None]:
    """Return versions by distribution, null if not installed, and those of Python, the platform and spec_lab."""
    from spec_lab.core.version import VERSION

    versions: dict[str, str | None] = {
        "spec_lab": VERSION,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def git_revision(folder: Path | None = None, tracked: str = "__init__.py") -> str | None:
    """Return the commit of the checkout that `folder` (default: this package) is tracked in, with `+dirty` for local
    changes.

    `tracked` is a file in the folder that git must track. Without this check, a package installed in a virtual
    environment inside an unrelated repository would get that repository's commit. The result is None outside a
    checkout, and if git does not answer.
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
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """Return the name of the accelerator behind a torch device, or of the CPU."""
    if not device.startswith("cuda"):
        return cpu_model()
    import torch

    return torch.cuda.get_device_name(torch.device(device))


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
