"""drafter=eagle3."""

from __future__ import annotations

from typing import Any

from spec_lab.build.heads import DrafterFactory, DrafterResources, head_folder, make_picker
from spec_lab.build.models import Models, build_cache
from spec_lab.config import Eagle3DrafterConfig, RunConfig
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import FeatureSpec
from spec_lab.drafters.recurrent import RecurrentDrafter
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.eagle3_checkpoint import default_tap_layer_inputs, load_eagle3


def load_eagle3_drafter(config: RunConfig, options: Eagle3DrafterConfig, models: Models) -> DrafterFactory:
    target = models.target
    folder = head_folder(config, options)
    head_config, tensors = load_eagle3(folder, target.config, models.dtype, models.device)
    taps = head_config.tap_layer_inputs or default_tap_layer_inputs(target.config.num_layers)
    head = Eagle3Head(head_config, tensors, target.embedding, target.head_weight, models.backend, target.num_positions)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer, 1, resources.limits, models).layers[0]
        picker = make_picker(config, options, models, resources)
        features = FeatureSpec(layer_inputs=taps)
        return RecurrentDrafter(
            options.num_draft_tokens, head, features, cache, models.backend, resources.prune, picker
        )

    return make
