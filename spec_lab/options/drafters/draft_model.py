"""drafter=draft_model: its keys, refusals and loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import TrainedDrafterConfig
from spec_lab.menu.option import DrafterOption
from spec_lab.options.shipped import DrafterWeights, zoo_folders

if TYPE_CHECKING:
    from spec_lab.checkpoints.config import ModelConfig
    from spec_lab.core.kv_cache import PagedKVCache
    from spec_lab.core.protocols import Drafter
    from spec_lab.models.decoder import Decoder
    from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
    from spec_lab.wiring.models import DrafterBuild


WEIGHTS = DrafterWeights(zoo_folders("draft_model"))


@dataclass
class DraftModelDrafterConfig(TrainedDrafterConfig):
    """drafter=draft_model: a small language model of its own."""

    name: str = "draft_model"


def load(chosen: Chosen, options: DraftModelDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a checkpoint that could be a target; UserError if its layers keep states, or both its vocabulary's size and
    its tokenizer are others than the target's."""
    from spec_lab.drafters.draft_model import DraftModelDrafter
    from spec_lab.wiring.caches import attention_kinds
    from spec_lab.wiring.drafting import make_picker

    model, make_cache = _load(chosen, options, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = make_cache(resources)
        picker = make_picker(chosen, options, build, resources)
        kinds = attention_kinds(model.layer_plans)
        return DraftModelDrafter(
            options.num_draft_tokens,
            model,
            cache,
            build.backend,
            resources.prune,
            picker,
            build.kernels,
            kinds,
            build.target.vocab_size,
        )

    return make


def load_tree(chosen: Chosen, options: DraftModelDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same model, which drafts the branches of a tree."""
    from spec_lab.drafters.draft_model import DraftModelTreeDrafter
    from spec_lab.wiring.drafting import build_siblings, build_tree_shape, shape_of_engine, tree_backend

    model, make_cache = _load(chosen, options, build)
    shape = build_tree_shape(chosen, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        siblings = build_siblings(chosen, build, resources, shape)
        grown = shape_of_engine(chosen, shape, resources)
        return DraftModelTreeDrafter(
            grown,
            siblings,
            model,
            make_cache(resources),
            tree_backend(build),
            resources.prune,
            build.target.vocab_size,
        )

    return make


def _load(
    chosen: Chosen, options: DraftModelDrafterConfig, build: DrafterBuild
) -> tuple[Decoder, Callable[[DrafterResources], PagedKVCache]]:
    """Read the model; also return a function that makes its cache for each engine."""
    from spec_lab.checkpoints.families.table import read_model_config
    from spec_lab.models.target_loader import WeightSource, load_target
    from spec_lab.wiring.caches import build_cache
    from spec_lab.workloads.tokenizer import num_other_tokens

    folder = chosen.drafter_folder
    model_config = read_model_config(folder)
    if model_config.keeps_states:
        raise UserError(
            f"{folder}: a draft model whose layers keep a state is not supported, since rejected drafts stay in it; "
            "set drafter.path to a model whose layers all have attention"
        )
    has_padding = model_config.vocab_size != build.target.vocab_size
    if num_others := num_other_tokens(chosen.target_folder, folder):
        said = f"{folder}: {num_others} ids of its tokenizer are other tokens than the target's"
        if has_padding:
            raise UserError(f"{said}; set drafter.path to a model of the target's family")
        build.warnings.append(f"{said}, so its drafts mean other texts")
    source = WeightSource(folder, build.dtype, build.device)
    products = build.kernels.draft_model_products
    model = load_target(model_config, source, build.backend, build.target.num_positions, products)
    build.adopt(model.expert_parts)
    model.num_tokens = build.target.num_tokens = min(model.vocab_size, build.target.vocab_size)

    def make_cache(resources: DrafterResources) -> PagedKVCache:
        _refuse_few_positions(model_config, folder, resources.limits.max_seq_len)
        return build_cache(model_config.layers, resources.limits, build)

    return model, make_cache


def _refuse_few_positions(model_config: ModelConfig, folder: Path, max_seq_len: int) -> None:
    """Refuse a model with too few positions, which would silently give useless drafts."""
    num_positions = min(model_config.max_position_embeddings, model_config.max_dense_positions or max_seq_len)
    if max_seq_len > num_positions:
        raise UserError(
            f"{folder}: the draft model can use {num_positions} positions, but the cache has {max_seq_len} for a "
            "sequence; lower max_new_tokens or use shorter prompts, with cache.max_seq_len=null, or set drafter.path "
            "to a model with more"
        )


ROW = DrafterOption(
    name="draft_model",
    schema=DraftModelDrafterConfig,
    load=load,
    refusals=(WEIGHTS.missing,),
    folder=WEIGHTS.folder,
    load_tree=load_tree,
    notes_confidence=True,
)
