"""drafter=eagle3 and p_eagle, and what makes the drafter of any head that is run draft by draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_lab.config.choices import Weights
from spec_lab.config.option import knob, option
from spec_lab.options.drafters.weights import WeightsConfig

if TYPE_CHECKING:
    import torch

    from spec_lab.build.lab import Lab
    from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config
    from spec_lab.checkpoints.plan import LayerPlan
    from spec_lab.core.protocols import Drafter
    from spec_lab.core.types import FeatureSpec
    from spec_lab.models.eagle3 import Eagle3Head
    from spec_lab.models.p_eagle import PEagleHead


@option("drafter", "eagle3")
class Eagle3(WeightsConfig):
    """An EAGLE-3 head: one layer over three tapped hidden states of the target."""

    drafts_trees = True
    hands_hidden_on = True
    ingests_in_graphs = True

    window: int | None = knob(None, "newest keys the head's attention sees; null is all of them", least=1)
    draft_vocab_size: int | None = knob(
        None, "tokens that random weights can draft; null is all of the target's; a checkpoint has its own", least=1
    )

    def read(self, lab: Lab) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
        from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
        from spec_lab.checkpoints.random_weights import random_eagle3

        target = lab.target.config
        if self.weights == Weights.random:
            return random_eagle3(target, self.draft_vocab_size, lab.dtype, lab.device, lab.run.seed + 1)
        return load_eagle3(self.folder(lab.run), target, lab.dtype, lab.device)

    def model(self, lab: Lab, config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> Eagle3Head:
        from spec_lab.models.eagle3 import Eagle3Head

        return lab.beside_target(partial(Eagle3Head, window=self.window), config, tensors)

    def drafter(self, lab: Lab, model: Eagle3Head) -> Drafter[Any]:
        from spec_lab.core.types import FeatureSpec

        features = FeatureSpec(layer_inputs=model.config.tap_layer_inputs)
        plan = replace(model.config.layer.only_layer, window=self.window)
        return recurrent_drafter(self, lab, model, features, plan)


@option("drafter", "p_eagle")
class PEagle(WeightsConfig):
    """An EAGLE-3 head whose catch-up step makes all drafts."""

    drafts_trees = True
    ingests_in_graphs = True
    one_pass = True

    num_layers: int = knob(2, "layers of a head of random weights", least=1, most=64)

    def drafter(self, lab: Lab, model: PEagleHead) -> Drafter[Any]:
        from spec_lab.core.types import FeatureSpec
        from spec_lab.drafters.block import BlockDrafter, BlockTreeDrafter
        from spec_lab.drafters.p_eagle import PEaglePass

        config = model.config
        features = FeatureSpec(layer_inputs=config.tap_layer_inputs)
        cache = lab.cache((*config.layer.layers, *config.more_layers))
        block_pass = PEaglePass(
            self.num_draft_tokens, model, features=features, cache=cache, backend=lab.backend, prune=lab.kept
        )
        if lab.run.sizes is None:
            return BlockDrafter(block_pass, lab.picker(self), lab.span)
        return BlockTreeDrafter(block_pass, *lab.tree(), lab.span)

    def read(self, lab: Lab) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
        from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
        from spec_lab.checkpoints.random_weights import random_eagle3

        target = lab.target.config
        if self.weights == Weights.random:
            return random_eagle3(target, None, lab.dtype, lab.device, lab.run.seed + 1, self.num_layers)
        return load_eagle3(self.folder(lab.run), target, lab.dtype, lab.device, "peagle")

    def model(self, lab: Lab, config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> PEagleHead:
        from spec_lab.models.p_eagle import PEagleHead

        return lab.beside_target(PEagleHead, config, tensors)


def recurrent_drafter(
    option: WeightsConfig,
    lab: Lab,
    head: Any,
    features: FeatureSpec,
    plan: LayerPlan,
) -> Drafter[Any]:
    """Make the drafter of one engine from a head that is run draft by draft: of chains, or of the run's tree.

    Args:
        features: what the head reads of the target.
        plan: of the head's layer.
    """
    from spec_lab.build.caches import attention_kinds
    from spec_lab.drafters.recurrent import RecurrentDrafter, RecurrentTreeDrafter

    parts: dict[str, Any] = {
        "num_draft_tokens": option.num_draft_tokens,  # of a tree the depth
        "head": head,
        "features": features,
        "cache": lab.cache([plan]).layers[0],
        "backend": lab.backend,
        "prune": lab.kept,
    }
    if lab.run.sizes is None:
        kinds = attention_kinds([plan])
        return RecurrentDrafter(picker=lab.picker(option), kernels=lab.kernels, kinds=kinds, **parts)
    shape, siblings = lab.tree()
    return RecurrentTreeDrafter(shape=shape, siblings=siblings, **parts)
