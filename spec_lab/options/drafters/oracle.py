"""drafter=oracle: a continuation that was recorded before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig
from spec_lab.menu.option import DrafterOption

if TYPE_CHECKING:
    from spec_lab.wiring.drafting import DrafterFactory
    from spec_lab.wiring.models import DrafterBuild


@dataclass
class OracleDrafterConfig(DrafterConfig):
    """drafter=oracle: drafts what plain decoding wrote before the timed part. It is an upper bound, and greedy only."""

    name: str = "oracle"


def load(chosen: Chosen, options: DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=oracle."""
    from spec_lab.drafters.oracle import OracleDrafter
    from spec_lab.wiring.drafting import token_history

    return lambda resources: OracleDrafter(options.num_draft_tokens, token_history(resources, build))


ROW = DrafterOption(
    name="oracle",
    schema=OracleDrafterConfig,
    load=load,
    follows_greedy_text="replays a greedy continuation",
    no_moves="replays a continuation",
)
