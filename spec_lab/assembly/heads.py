"""What the loaders of trained drafters share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.assembly.models import ZOO, Limits, Models
from spec_lab.compatibility.drafters import no_weights_shipped
from spec_lab.config import RejectionConfig, RunConfig, TrainedDrafterConfig
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.protocols import Drafter, PrunePolicy
from spec_lab.drafters.picking import BiasedGreedyPicker, DraftPicker, GreedyPicker, SamplingPicker
from spec_lab.errors import UserError


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """What one engine has for its drafter. `target_cache` is for drafters that read the target's KV."""

    limits: Limits
    prune: PrunePolicy
    seeds: SlotSeeds
    target_cache: PagedKVCache


DrafterFactory = Callable[[DrafterResources], Drafter[Any]]


def make_picker(
    config: RunConfig, options: TrainedDrafterConfig, models: Models, resources: DrafterResources
) -> DraftPicker:
    """How the drafter picks its tokens: `drafter.draft_sampling`, and `acceptance.allow_lossy`."""
    biased = isinstance(config.acceptance, RejectionConfig) and config.acceptance.allow_lossy
    is_greedy = options.draft_sampling == "greedy"
    if is_greedy and not biased:
        return GreedyPicker()
    num_slots, num_draft_tokens = resources.limits.num_slots, options.num_draft_tokens
    kept = DraftLogits(num_slots, num_draft_tokens, models.target.vocab_size, models.device)
    picker = BiasedGreedyPicker if is_greedy else SamplingPicker
    return picker(config.sampling.temperature, resources.seeds, kept, models.kernels.sample_draft)


def head_folder(config: RunConfig, options: TrainedDrafterConfig) -> Path:
    """`drafter.path`, or the weights shipped for the pocket target.

    Raises:
        UserError: no path, and another target than the shipped one.
    """
    if options.path is not None:
        return Path(options.path)
    if config.target.name != "pocket":
        raise UserError(no_weights_shipped(options, config.target))
    return ZOO / f"pocket-{options.name}"
