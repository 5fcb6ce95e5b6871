"""drafter=draft_model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_lab.config.choices import KernelsChoice
from spec_lab.config.option import option
from spec_lab.core.errors import UserError
from spec_lab.options.drafters.weights import WeightsConfig

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.checkpoints.config import ModelConfig
    from spec_lab.core.protocols import Drafter
    from spec_lab.models.decoder import Decoder


@option("drafter", "draft_model")
class DraftModel(WeightsConfig):
    """A small language model of its own."""

    drafts_trees = True

    def drafter(self, lab: Lab, model: tuple[Decoder, list[str]]) -> Drafter[Any]:
        from spec_lab.build.caches import attention_kinds
        from spec_lab.drafters.draft_model import DraftModelDrafter, DraftModelTreeDrafter

        decoder, warnings = model
        lab.warnings.extend(warnings)
        decoder.num_tokens = lab.target.num_tokens = min(decoder.vocab_size, lab.target.vocab_size)
        config, longest = decoder.config, lab.limits.max_seq_len
        num_positions = min(config.max_position_embeddings, config.max_dense_positions or longest)
        if longest > num_positions:  # its drafts would be useless, in silence
            raise UserError(
                f"{self.folder(lab.run)}: the draft model can use {num_positions} positions, but a sequence has "
                f"{longest}; lower max_new_tokens, or set drafter.path to a model with more"
            )
        parts: dict[str, Any] = {
            "num_draft_tokens": self.num_draft_tokens,  # of a tree the depth
            "model": decoder,
            "cache": lab.cache(config.layers),
            "backend": lab.backend,
            "prune": lab.kept,
            "vocab_size": lab.target.vocab_size,
        }
        if lab.run.sizes is None:
            kinds = attention_kinds(decoder.layer_plans)
            return DraftModelDrafter(picker=lab.picker(self), kernels=lab.kernels, kinds=kinds, **parts)
        shape, siblings = lab.tree()
        return DraftModelTreeDrafter(shape=shape, siblings=siblings, **parts)

    def read(self, lab: Lab) -> tuple[ModelConfig, list[str]]:
        """Read the config, and return it with warnings for the record.

        Raises:
            UserError: its layers keep states, or both its vocabulary's size and its tokenizer are others than the
                target's.
        """
        from spec_lab.checkpoints.families import read_model_config
        from spec_lab.workloads.tokenizer import num_other_tokens

        folder = self.folder(lab.run)
        config = read_model_config(folder)
        if config.keeps_states:
            raise UserError(
                f"{folder}: rejected drafts would stay in this draft model's states; use another drafter.path"
            )
        warnings = []
        if num_others := num_other_tokens(lab.run.target.folder, folder):
            said = f"{folder}: {num_others} ids of its tokenizer are other tokens than the target's"
            if config.vocab_size != lab.target.vocab_size:
                raise UserError(f"{said}; set drafter.path to a model of the target's family")
            warnings.append(f"{said}, so its drafts mean other texts")
        return config, warnings

    def model(self, lab: Lab, config: ModelConfig, tensors: list[str]) -> tuple[Decoder, list[str]]:
        """Load the model; `tensors` are the warnings, which go with it."""
        from spec_lab.models.target_loader import WeightSource, load_target

        source = WeightSource(self.folder(lab.run), lab.dtype, lab.device)
        # With kernels=triton, torch computes the parts of so small a model.
        kernels = lab.kernels if lab.run.kernels == KernelsChoice.native else lab.kernels.without_parts()
        return load_target(config, source, lab.backend, lab.target.num_positions, kernels), tensors
