"""What the trainer's commands share: the group `target`, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from spec_lab.core.errors import Breakdown, UserError
from spec_lab.train.config import TargetChoice

TARGETS = ("hf", "pocket", "pocket_gemma", "smollm2_135m")
"""The targets of a run whose weights can be here, and whose layers are those that heads are trained for."""


def store_targets() -> None:
    """Make the options of `target=` known to Hydra."""
    for name in TARGETS:
        ConfigStore.instance().store(group="target", name=name, node=TargetChoice(name=name))


def ended(work: Callable[[Path], object]) -> None:
    """Call `work` with Hydra's folder of this job. What it refuses ends the process with 2, what breaks down with 1.

    Runs that are composed inside have groups of the same names, so ours are taken away meanwhile.
    """
    folder, stored = Path(HydraConfig.get().runtime.output_dir), ConfigStore.instance().repo
    own: dict[str, object] = {group: stored.pop(group) for group in ("target", "drafter") if group in stored}
    try:
        work(folder)
        print(folder)
    except (UserError, Breakdown) as error:
        print(f"{'refused' if isinstance(error, UserError) else 'failed'}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None
    finally:
        stored.update(own)
