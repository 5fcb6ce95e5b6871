"""drafter=frozen_kv."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.packaged import SHAPES
from spec_lab.config.choices import Choice, Weights
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.options.drafters.weights import WeightsConfig

if TYPE_CHECKING:
    import torch

    from spec_lab.build.lab import Lab
    from spec_lab.checkpoints.gemma4_assistant_checkpoint import AssistantConfig
    from spec_lab.core.protocols import Drafter
    from spec_lab.models.gemma4_assistant import Gemma4Assistant


class FrozenKvPosition(Choice):
    """The position that every draft step of a frozen-KV drafter uses."""

    last = "last", "SGLang, vLLM"
    bonus = "bonus", "transformers, with sliding windows that are a key wider"


@option("drafter", "frozen_kv")
class FrozenKv(WeightsConfig):
    """Queries only, over the target's KV (the Gemma 4 assistant)."""

    drafts_trees = True
    hands_hidden_on = True
    ingests_in_graphs = True

    position: FrozenKvPosition = knob(FrozenKvPosition.last, "position of the query in every draft step")

    def shipped(self, run: Run) -> Path:
        """An assistant's sizes do not follow from its target's, so random weights need a shipped config.json."""
        shape = SHAPES / f"{run.target.name}_assistant"
        return shape if self.weights == Weights.random else super().shipped(run)

    def read(self, lab: Lab) -> tuple[AssistantConfig, dict[str, torch.Tensor]]:
        from spec_lab.checkpoints.gemma4_assistant_checkpoint import load_assistant, read_assistant_config
        from spec_lab.checkpoints.random_weights import random_assistant

        folder, target = self.folder(lab.run), lab.target.config
        if self.weights == Weights.random:
            assistant = read_assistant_config(folder, target)
            return assistant, random_assistant(assistant, lab.dtype, lab.device, lab.run.seed + 1)
        return load_assistant(folder, target, lab.dtype, lab.device)

    def model(self, lab: Lab, config: AssistantConfig, tensors: Mapping[str, torch.Tensor]) -> Gemma4Assistant:
        from spec_lab.drafters.frozen_kv import ANCHORS
        from spec_lab.models.gemma4_assistant import Gemma4Assistant

        target = lab.target
        return Gemma4Assistant(
            config,
            tensors,
            target_embedding=target.embedding,
            backend=lab.backend,
            max_positions=target.num_positions,
            extra_window_keys=ANCHORS[self.position].extra_window_keys,
            partition=target.partition,
            kernels=target.kernels,
        )

    def drafter(self, lab: Lab, model: Gemma4Assistant) -> Drafter[Any]:
        """Make the drafter of one engine, each layer of which reads the cache of a target layer."""
        from spec_lab.drafters.frozen_kv import ANCHORS, FrozenKVDrafter, FrozenKVTreeDrafter

        caches = [lab.target_cache.layers[source] for source in model.config.kv_sources]
        parts: Any = {"head": model, "caches": caches, "backend": lab.backend, "anchor": ANCHORS[self.position]}
        if lab.run.sizes is None:
            return FrozenKVDrafter(num_draft_tokens=self.num_draft_tokens, picker=lab.picker(self), **parts)
        shape, siblings = lab.tree()
        return FrozenKVTreeDrafter(num_draft_tokens=shape.depth, shape=shape, siblings=siblings, **parts)
