"""Drafters without weights: drafter=none, ngram, oracle, random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.option import DrafterOption
from spec_lab.assembly.trees import DynamicTreeConfig
from spec_lab.config import DrafterConfig, RunConfig, TreeConfig, knob

LOADER = "spec_lab.assembly.drafters.lookup_loader"


@dataclass
class NoDrafterConfig(DrafterConfig):
    """drafter=none: plain decoding."""

    name: str = "none"
    num_draft_tokens: int = knob(0, "0: nothing is drafted")


@dataclass
class RandomDrafterConfig(DrafterConfig):
    """drafter=random: uniform tokens, the lower bound."""

    name: str = "random"


@dataclass
class OracleDrafterConfig(DrafterConfig):
    """drafter=oracle: replays a plain continuation recorded before the timed part, the upper bound. Greedy only."""

    name: str = "oracle"


@dataclass
class NgramDrafterConfig(DrafterConfig):
    """drafter=ngram: prompt lookup; the longest suffix of max_ngram..min_ngram tokens seen before, continued."""

    name: str = "ngram"
    max_ngram: int = knob(4, "longest suffix of the text that is looked up, in tokens", most=1024)
    min_ngram: int = knob(2, "shortest suffix of the text that is looked up, in tokens")


def none_drafts_nothing(config: RunConfig) -> str | None:
    """drafter=none has no draft tokens to count."""
    num_draft_tokens = config.drafter.num_draft_tokens
    if num_draft_tokens == 0:
        return None
    return (
        f"drafter=none drafts nothing, so drafter.num_draft_tokens={num_draft_tokens} has no meaning; "
        "leave it out or choose drafter=eagle3"
    )


def ngram_lengths(config: RunConfig) -> str | None:
    """The suffixes that are looked up have at least one token, and there is a longest."""
    options: Any = config.drafter
    if 1 <= options.min_ngram <= options.max_ngram:
        return None
    return (
        f"drafter.min_ngram={options.min_ngram} must be at least 1 and at most drafter.max_ngram={options.max_ngram}; "
        "use drafter.min_ngram=2 drafter.max_ngram=4"
    )


def continuations_have_no_ranks(config: RunConfig) -> str | None:
    """Continuations that are looked up have no probabilities by which paths could name them."""
    if config.tree.name in (TreeConfig.name, DynamicTreeConfig.name):
        return None
    return f"drafter=ngram looks up no ranks of tree={config.tree.name}; use tree=dynamic, or drafter=eagle3"


OPTIONS = (
    DrafterOption(
        name="none",
        ingests_in_graphs=True,
        schema=NoDrafterConfig,
        load=Deferred(LOADER, "load_none"),
        refusals=(none_drafts_nothing,),
        drafts=False,
        no_moves="has no draft steps",
    ),
    DrafterOption(
        name="ngram",
        schema=NgramDrafterConfig,
        load=Deferred(LOADER, "load_ngram"),
        refusals=(ngram_lengths, continuations_have_no_ranks),
        no_moves="looks its drafts up",
        load_tree=Deferred(LOADER, "load_ngram_tree"),
    ),
    DrafterOption(
        name="oracle",
        schema=OracleDrafterConfig,
        load=Deferred(LOADER, "load_oracle"),
        follows_greedy_text="replays a greedy continuation",
        no_moves="replays a continuation",
    ),
    DrafterOption(
        name="random",
        schema=RandomDrafterConfig,
        load=Deferred(LOADER, "load_random"),
        no_moves="draws its drafts",
    ),
)
