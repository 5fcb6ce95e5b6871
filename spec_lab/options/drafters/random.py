"""drafter=random: uniform tokens."""

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
class RandomDrafterConfig(DrafterConfig):
    """drafter=random: uniform tokens, the lower bound."""

    name: str = "random"


def load(chosen: Chosen, options: DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=random."""
    from spec_lab.drafters.random import RandomDrafter

    vocab_size = build.target.vocab_size
    return lambda resources: RandomDrafter(options.num_draft_tokens, vocab_size, resources.seeds)


ROW = DrafterOption(name="random", schema=RandomDrafterConfig, load=load, no_moves="draws its drafts")
