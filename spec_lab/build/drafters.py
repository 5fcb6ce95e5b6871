"""From `drafter=` to a factory of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.build.models import ZOO, Limits, Models, build_cache
from spec_lab.config import DrafterConfig, Eagle3DrafterConfig, NgramDrafterConfig, RejectionConfig, RunConfig
from spec_lab.core.protocols import Drafter, PrunePolicy
from spec_lab.drafters.eagle3 import Eagle3Drafter
from spec_lab.drafters.history import TokenHistory
from spec_lab.drafters.ngram import NgramDrafter
from spec_lab.drafters.none import NoDrafter
from spec_lab.drafters.oracle import OracleDrafter
from spec_lab.drafters.picking import BiasedGreedyPicker, DraftPicker, GreedyPicker, SamplingPicker
from spec_lab.drafters.random import RandomDrafter
from spec_lab.errors import UserError
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.eagle3_checkpoint import default_tap_layer_inputs, load_eagle3


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """What one engine has for its drafter."""

    limits: Limits
    prune: PrunePolicy
    seeds: SlotSeeds


DrafterFactory = Callable[[DrafterResources], Drafter[Any]]


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


def _picker(
    config: RunConfig, options: Eagle3DrafterConfig, models: Models, resources: DrafterResources
) -> DraftPicker:
    biased = isinstance(config.acceptance, RejectionConfig) and config.acceptance.allow_lossy
    is_greedy = options.draft_sampling == "greedy"
    if is_greedy and not biased:
        return GreedyPicker()
    num_slots, num_draft_tokens = resources.limits.num_slots, options.num_draft_tokens
    kept = DraftLogits(num_slots, num_draft_tokens, models.target.vocab_size, models.device)
    picker = BiasedGreedyPicker if is_greedy else SamplingPicker
    return picker(config.sampling.temperature, resources.seeds, kept, num_draft_tokens)


def _load_eagle3(config: RunConfig, options: Eagle3DrafterConfig, models: Models) -> DrafterFactory:
    target = models.target
    folder = _head_folder(config, options)
    head_config, tensors = load_eagle3(folder, target.config, models.dtype, models.device)
    taps = head_config.tap_layer_inputs or default_tap_layer_inputs(target.config.num_layers)
    head = Eagle3Head(head_config, tensors, target.embedding, target.head_weight, models.backend, target.num_positions)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer, 1, resources.limits, models).layers[0]
        picker = _picker(config, options, models, resources)
        return Eagle3Drafter(options.num_draft_tokens, head, taps, cache, models.backend, resources.prune, picker)

    return make


def _head_folder(config: RunConfig, options: Eagle3DrafterConfig) -> Path:
    if options.path is not None:
        return Path(options.path)
    if config.target.name != "pocket":
        raise UserError(f"no {options.name} head is shipped for target={config.target.name}; set drafter.path=FOLDER")
    return ZOO / f"pocket-{options.name}"


DRAFTERS: Mapping[str, Callable[..., DrafterFactory]] = {
    "none": _load_none,
    "eagle3": _load_eagle3,
    "ngram": _load_ngram,
    "oracle": _load_oracle,
    "random": _load_random,
}
