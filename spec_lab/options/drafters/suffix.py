"""drafter=suffix: its keys, refusals and loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig, RunConfig, knob
from spec_lab.menu.option import DrafterOption

if TYPE_CHECKING:
    from spec_lab.drafters.suffix import SuffixSizes
    from spec_lab.wiring.drafting import DrafterFactory
    from spec_lab.wiring.models import DrafterBuild


@dataclass
class SuffixDrafterConfig(DrafterConfig):
    """drafter=suffix: suffix decoding. It drafts the most frequent continuation of the text's end, in this text or in
    outputs of ended requests."""

    name: str = "suffix"
    num_draft_tokens: int = knob(8, "most draft tokens a round, K; a round offers as many as are found")
    depth: int = knob(24, "most tokens of match and draft together", least=2, most=256)
    factor: float = knob(1.0, "most draft tokens for each token of the match", least=0.125, most=16)
    min_probability: float = knob(
        0.1, "a draft ends before the estimated probability of its tokens falls below this", least=0, most=1
    )
    outputs: int = knob(1000, "outputs of ended requests that are searched too; 0 is the request alone", least=0)


def depth_has_room(config: RunConfig) -> str | None:
    """The depth must have room for the matched tokens and the draft after them."""
    options: Any = config.drafter
    if options.depth > options.num_draft_tokens:
        return None
    return (
        f"drafter.depth={options.depth} leaves no token to match with "
        f"drafter.num_draft_tokens={options.num_draft_tokens}; use drafter.depth={3 * options.num_draft_tokens}"
    )


def load(chosen: Chosen, options: SuffixDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=suffix."""
    from spec_lab.drafters.suffix import SuffixDrafter

    return lambda resources: SuffixDrafter(suffix_sizes(options))


def suffix_sizes(options: SuffixDrafterConfig) -> SuffixSizes:
    """Read the sizes of the trees."""
    from spec_lab.drafters.suffix import SuffixSizes
    from spec_lab.drafters.suffix_tree import DraftLimits

    limits = DraftLimits(options.num_draft_tokens, options.factor, options.min_probability)
    return SuffixSizes(options.depth, limits, options.outputs)


ROW = DrafterOption(
    name="suffix",
    schema=SuffixDrafterConfig,
    load=load,
    refusals=(depth_has_room,),
    no_moves="looks its drafts up",
    drafts_on_host=True,
)
