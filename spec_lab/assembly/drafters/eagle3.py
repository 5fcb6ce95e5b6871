"""drafter=eagle3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import TrainedDrafterConfig, head_folder, needs_weights, shipped_for_pocket
from spec_lab.assembly.option import DrafterOption
from spec_lab.config import RunConfig, knob


@dataclass
class Eagle3DrafterConfig(TrainedDrafterConfig):
    """drafter=eagle3: a one-layer EAGLE-3 head."""

    name: str = "eagle3"
    window: int | None = knob(None, "newest keys the head's attention sees; null is all of them")


def window_shows_a_row(config: RunConfig) -> str | None:
    """A row sees itself at least."""
    options: Any = config.drafter
    if options.window is None or options.window >= 1:
        return None
    return (
        f"drafter.window={options.window} hides a row from itself; use drafter.window=1 or more, or "
        "drafter.window=null for all keys"
    )


OPTION = DrafterOption(
    name="eagle3",
    schema=Eagle3DrafterConfig,
    load=Deferred("spec_lab.assembly.drafters.eagle3_loader", "load_eagle3_drafter"),
    refusals=(needs_weights, window_shows_a_row),
    shipped=shipped_for_pocket("eagle3"),
    folder=head_folder,
    aspects=Deferred("spec_lab.doctor.aspects", "eagle3_aspects"),
    hands_hidden_on=True,
)
