"""drafter=hybrid: its keys, refusals and loader."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.menu import registry
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig, RunConfig, knob
from spec_lab.menu.option import DrafterOption
from spec_lab.options.drafters.suffix import SuffixDrafterConfig, depth_has_room, suffix_sizes

if TYPE_CHECKING:
    from spec_lab.wiring.drafting import DrafterFactory
    from spec_lab.wiring.models import DrafterBuild

HEADS = ("eagle3", "mtp_eagle", "frozen_kv", "draft_model")
"""The drafters that may be the model part. mtp_vanilla may not, since it always runs all of its modules."""


@dataclass
class HybridDrafterConfig(SuffixDrafterConfig):
    """drafter=hybrid: suffix decoding and a model's head. In a round, a request takes the drafts of the part whose
    expected acceptance is longer."""

    name: str = "hybrid"
    parts: list[str] = knob(
        ["suffix", "eagle3"], "the two parts: suffix, and a drafter with weights that drafts a chain"
    )
    head_drafts: int = knob(3, "drafts of the head in a round; suffix makes up to num_draft_tokens", least=1)
    path: str | None = knob(None, "folder of the head's weights; null is what is shipped for the target")


def two_parts(config: RunConfig) -> str | None:
    """The parts must be suffix first, and then one of `HEADS`."""
    options: Any = config.drafter
    if len(options.parts) == 2 and options.parts[0] == "suffix" and options.parts[1] in HEADS:
        return None
    return (
        f"drafter.parts=[{','.join(options.parts)}] must be suffix and one of {', '.join(HEADS)}; use "
        "drafter.parts=[suffix,eagle3]"
    )


def head_drafts_fit(config: RunConfig) -> str | None:
    """The head's drafts must fit into a round."""
    options: Any = config.drafter
    if options.head_drafts <= options.num_draft_tokens:
        return None
    return (
        f"drafter.head_drafts={options.head_drafts} is more than drafter.num_draft_tokens={options.num_draft_tokens}, "
        f"the most that a round can hold; use drafter.num_draft_tokens={options.head_drafts}"
    )


def head_is_refused_nothing(config: RunConfig) -> str | None:
    """The head must not be refused as the only drafter of the run."""
    if two_parts(config) is not None:
        return None
    row, alone = _head(config)
    return next((said for refusal in row.refusals if (said := refusal(alone)) is not None), None)


def folder(config: RunConfig, options: HybridDrafterConfig) -> Path:
    """Return the folder of the head's weights."""
    row, alone = _head(config)
    assert row.folder is not None, "every head has weights"
    return row.folder(alone, alone.drafter)


def load(chosen: Chosen, options: HybridDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the head, with room for the drafts of suffix; the factory makes both parts."""
    from spec_lab.drafters.hybrid import HybridDrafter

    row, alone = _head(chosen.config)
    make, names = row.load(chosen.again(alone), alone.drafter, build), (options.parts[0], options.parts[1])
    return lambda resources: HybridDrafter(make(resources), names, options.head_drafts, suffix_sizes(options))


def _head(config: RunConfig) -> tuple[DrafterOption, RunConfig]:
    """Return the head's option, and the run that drafts only with it."""
    options: Any = config.drafter
    row = registry.load(config.extensions).find(DrafterOption, options.parts[1])
    schema: Any = row.schema
    head: DrafterConfig = schema(num_draft_tokens=options.num_draft_tokens, path=options.path)
    return row, dataclasses.replace(config, drafter=head)


ROW = DrafterOption(
    name="hybrid",
    schema=HybridDrafterConfig,
    load=load,
    folder=folder,
    refusals=(two_parts, head_drafts_fit, depth_has_room, head_is_refused_nothing),
    drafts_on_host=True,
)
