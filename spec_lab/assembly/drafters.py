"""From `drafter=` to a factory of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spec_lab.assembly.draft_model import load_draft_model
from spec_lab.assembly.eagle3 import load_eagle3_drafter
from spec_lab.assembly.frozen_kv import load_frozen_kv_drafter
from spec_lab.assembly.heads import DrafterFactory, DrafterResources
from spec_lab.assembly.models import Models
from spec_lab.assembly.mtp import load_mtp_eagle_drafter
from spec_lab.assembly.mtp_vanilla import load_mtp_vanilla_drafter
from spec_lab.config import DrafterConfig, NgramDrafterConfig, RunConfig
from spec_lab.drafters.history import TokenHistory
from spec_lab.drafters.ngram import NgramDrafter
from spec_lab.drafters.none import NoDrafter
from spec_lab.drafters.oracle import OracleDrafter
from spec_lab.drafters.random import RandomDrafter


def load_drafter(config: RunConfig, models: Models) -> DrafterFactory:
    """Load the drafter's weights; the factory then makes one drafter an engine around them."""
    return DRAFTERS[config.drafter.name](config, config.drafter, models)


def _load_none(config: RunConfig, options: DrafterConfig, models: Models) -> DrafterFactory:
    return lambda resources: NoDrafter()


def _load_random(config: RunConfig, options: DrafterConfig, models: Models) -> DrafterFactory:
    vocab_size = models.target.vocab_size
    return lambda resources: RandomDrafter(options.num_draft_tokens, vocab_size, resources.seeds)


def _history(resources: DrafterResources, models: Models) -> TokenHistory:
    limits = resources.limits
    return TokenHistory(limits.num_slots, limits.max_seq_len + limits.margin + 1, models.device)


def _load_oracle(config: RunConfig, options: DrafterConfig, models: Models) -> DrafterFactory:
    return lambda resources: OracleDrafter(options.num_draft_tokens, _history(resources, models))


def _load_ngram(config: RunConfig, options: NgramDrafterConfig, models: Models) -> DrafterFactory:
    sizes = options.max_ngram, options.min_ngram
    return lambda resources: NgramDrafter(options.num_draft_tokens, *sizes, _history(resources, models))


DRAFTERS: Mapping[str, Callable[..., DrafterFactory]] = {
    "none": _load_none,
    "draft_model": load_draft_model,
    "eagle3": load_eagle3_drafter,
    "frozen_kv": load_frozen_kv_drafter,
    "mtp_eagle": load_mtp_eagle_drafter,
    "mtp_vanilla": load_mtp_vanilla_drafter,
    "ngram": _load_ngram,
    "oracle": _load_oracle,
    "random": _load_random,
}
