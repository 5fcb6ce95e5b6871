"""drafter=none: plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig, RunConfig, knob
from spec_lab.menu.option import DrafterOption

if TYPE_CHECKING:
    from spec_lab.wiring.drafting import DrafterFactory
    from spec_lab.wiring.models import DrafterBuild


@dataclass
class NoDrafterConfig(DrafterConfig):
    """drafter=none: plain decoding."""

    name: str = "none"
    num_draft_tokens: int = knob(0, "0: nothing is drafted")


def none_drafts_nothing(config: RunConfig) -> str | None:
    """drafter=none has no draft tokens to count."""
    num_draft_tokens = config.drafter.num_draft_tokens
    if num_draft_tokens == 0:
        return None
    return (
        f"drafter=none drafts nothing, so drafter.num_draft_tokens={num_draft_tokens} has no meaning; "
        "leave it out or choose drafter=eagle3"
    )


def load(chosen: Chosen, options: DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=none."""
    from spec_lab.drafters.none import NoDrafter

    return lambda resources: NoDrafter()


ROW = DrafterOption(
    name="none",
    ingests_in_graphs=True,
    schema=NoDrafterConfig,
    load=load,
    refusals=(none_drafts_nothing,),
    drafts=False,
    no_moves="has no draft steps",
)
