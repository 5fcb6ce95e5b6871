"""This module makes the drafters without weights: none, ngram, oracle and random."""

from __future__ import annotations

from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.drafters.lookup import NgramDrafterConfig
from spec_lab.assembly.heads import DrafterFactory, DrafterResources
from spec_lab.assembly.models import DrafterBuild
from spec_lab.config import DrafterConfig
from spec_lab.drafters.history import TokenHistory
from spec_lab.drafters.ngram import NgramDrafter
from spec_lab.drafters.ngram_tree import NgramTreeDrafter
from spec_lab.drafters.none import NoDrafter
from spec_lab.drafters.oracle import OracleDrafter
from spec_lab.drafters.random import RandomDrafter


def load_none(chosen: Chosen, options: DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=none."""
    return lambda resources: NoDrafter()


def load_random(chosen: Chosen, options: DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=random."""
    vocab_size = build.target.vocab_size
    return lambda resources: RandomDrafter(options.num_draft_tokens, vocab_size, resources.seeds)


def _history(resources: DrafterResources, build: DrafterBuild) -> TokenHistory:
    limits = resources.limits
    return TokenHistory(limits.num_slots, limits.max_seq_len + limits.margin + 1, build.device)


def load_oracle(chosen: Chosen, options: DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=oracle."""
    return lambda resources: OracleDrafter(options.num_draft_tokens, _history(resources, build))


def load_ngram(chosen: Chosen, options: NgramDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=ngram."""
    sizes = options.max_ngram, options.min_ngram
    return lambda resources: NgramDrafter(options.num_draft_tokens, *sizes, _history(resources, build))


def load_ngram_tree(chosen: Chosen, options: NgramDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=ngram for trees."""
    sizes = chosen.sizes
    assert sizes is not None, "only runs with a tree are asked"
    of_tree, of_suffix = (sizes.depth, sizes.num_rows, sizes.topk), (options.max_ngram, options.min_ngram)
    return lambda resources: NgramTreeDrafter(*of_tree, *of_suffix, _history(resources, build))
