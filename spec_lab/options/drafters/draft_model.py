"""drafter=draft_model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_lab.config.option import option
from spec_lab.core.errors import UserError
from spec_lab.options.drafters.weights import WeightsConfig

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import Drafter
    from spec_lab.models.decoder import Decoder


@option("drafter", "draft_model")
class DraftModel(WeightsConfig):
    """A small language model of its own."""

    drafts_trees = True

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.build.caches import attention_kinds
        from spec_lab.drafters.draft_model import DraftModelDrafter, DraftModelTreeDrafter

        model = lab.once(self.key(lab.run), lambda: self.read(lab))
        config, longest = model.config, lab.limits.max_seq_len
        num_positions = min(config.max_position_embeddings, config.max_dense_positions or longest)
        if longest > num_positions:  # its drafts would be useless, in silence
            raise UserError(
                f"{self.folder(lab.run)}: the draft model can use {num_positions} positions, but a sequence has "
                f"{longest}; lower max_new_tokens, or set drafter.path to a model with more"
            )
        cache = lab.cache(config.layers)
        if lab.run.sizes is None:
            kinds, picker = attention_kinds(model.layer_plans), lab.picker(self)
            return DraftModelDrafter(
                self.num_draft_tokens, model, cache, lab.backend, lab.kept, picker, lab.kernels, kinds
            )
        shape = lab.tree()
        return DraftModelTreeDrafter(shape, lab.siblings(shape), model, cache, lab.tree_backend, lab.kept)

    def read(self, lab: Lab) -> Decoder:
        """Load the model; UserError if its layers keep states, or its vocabulary has another size than the target's."""
        from spec_lab.checkpoints.families.table import read_model_config
        from spec_lab.models.target_loader import WeightSource, load_target

        folder = self.folder(lab.run)
        config = read_model_config(folder, "drafter.path")
        if config.keeps_states:
            raise UserError(
                f"{folder}: rejected drafts would stay in this draft model's states; use another drafter.path"
            )
        if config.vocab_size != lab.target.vocab_size:
            raise UserError(
                f"{folder}: the draft model's vocabulary has {config.vocab_size} tokens, the target's has "
                f"{lab.target.vocab_size}; set drafter.path to a model of the target's family"
            )
        source = WeightSource(folder, lab.dtype, lab.device)
        products = lab.kernels.draft_model_products
        model = load_target(config, source, lab.backend, lab.target.num_positions, products)
        lab.models.adopt(model.expert_parts)
        return model
