"""This module loads drafter=draft_model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_lab.assembly.caches import build_cache
from spec_lab.assembly.drafters.draft_model import DraftModelDrafterConfig
from spec_lab.assembly.heads import DrafterFactory, DrafterResources, make_picker, weights_folder
from spec_lab.assembly.models import Models
from spec_lab.assembly.trees_loader import build_siblings, build_tree_shape, tree_backend
from spec_lab.config import RunConfig
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.protocols import Drafter
from spec_lab.drafters.draft_model import DraftModelDrafter
from spec_lab.drafters.draft_model_tree import DraftModelTreeDrafter
from spec_lab.errors import UserError
from spec_lab.models.config import ModelConfig
from spec_lab.models.decoder import Decoder
from spec_lab.models.families.table import read_model_config
from spec_lab.models.target_loader import WeightSource, load_target


def load_draft_model(config: RunConfig, options: DraftModelDrafterConfig, models: Models) -> DrafterFactory:
    """Read any checkpoint that could be a target; UserError when its vocabulary is not the target's."""
    model, make_cache = _load(config, options, models)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = make_cache(resources)
        picker = make_picker(config, options, models, resources)
        parts = models.backend, resources.prune, picker, models.kernels.plan_catchup
        return DraftModelDrafter(options.num_draft_tokens, model, cache, *parts)

    return make


def load_draft_model_of_trees(config: RunConfig, options: DraftModelDrafterConfig, models: Models) -> DrafterFactory:
    """Load the same model, which drafts the branches of a tree."""
    model, make_cache = _load(config, options, models)
    shape = build_tree_shape(config, models)

    def make(resources: DrafterResources) -> Drafter[Any]:
        siblings = build_siblings(config, models, resources, shape)
        return DraftModelTreeDrafter(
            shape, siblings, model, make_cache(resources), tree_backend(models), resources.prune
        )

    return make


def _load(
    config: RunConfig, options: DraftModelDrafterConfig, models: Models
) -> tuple[Decoder, Callable[[DrafterResources], PagedKVCache]]:
    """Read the model, and what makes its cache in an engine."""
    folder = weights_folder(config, options)
    model_config = read_model_config(folder, "drafter.path")
    if model_config.keeps_states:
        raise UserError(
            f"{folder}: a draft model whose layers keep a state is not supported, since rejected drafts stay in it; "
            "set drafter.path to a model whose layers all have attention"
        )
    if model_config.vocab_size != models.target.vocab_size:
        raise UserError(
            f"{folder}: a draft model with a vocabulary of {model_config.vocab_size}, the target's has "
            f"{models.target.vocab_size}; set drafter.path to a model of the target's family"
        )
    source = WeightSource(folder, models.dtype, models.device)
    products = models.kernels.draft_model_products
    model = load_target(model_config, source, models.backend, models.target.num_positions, products)
    models.adopt(model.expert_parts)

    def make_cache(resources: DrafterResources) -> PagedKVCache:
        _refuse_few_positions(model_config, folder, resources.limits.max_seq_len)
        return build_cache(model_config.layers, resources.limits, models)

    return model, make_cache


def _refuse_few_positions(model_config: ModelConfig, folder: Path, max_seq_len: int) -> None:
    """Positions past its own would give junk drafts without a word."""
    num_positions = min(model_config.max_position_embeddings, model_config.max_dense_positions or max_seq_len)
    if max_seq_len > num_positions:
        raise UserError(
            f"{folder}: the draft model runs over {num_positions} positions, sequences here reach "
            f"{max_seq_len}; lower max_new_tokens, use shorter prompts, or set drafter.path to a model with more"
        )
