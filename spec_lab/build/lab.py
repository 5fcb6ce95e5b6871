"""`Lab`: what `build` of an option gets. It has the loaded target and the parts of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.build.caches import build_cache
from spec_lab.build.limits import Limits
from spec_lab.build.models import Models
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.config.choices import DraftSampling
from spec_lab.config.option import get
from spec_lab.config.run import Run
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.kept import PrunePolicy
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.drafters.confidence import ConfidentGreedyPicker, ConfidentPicker
from spec_lab.drafters.growth import TreeShape
from spec_lab.drafters.history import TokenHistory
from spec_lab.drafters.picking import DraftPicker, GreedyPicker, SamplingPicker
from spec_lab.drafters.siblings import DrawnSiblings, LikeliestSiblings, SiblingPicker
from spec_lab.engine.capture import CudaGraphRecorder, GraphRecorder
from spec_lab.engine.tape import TapeRecorder

if TYPE_CHECKING:
    from spec_lab.options.drafters.weights import WeightsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab(Models):
    """What the parts of one engine are made from: the target with its related parts, and what this engine has beside.

    Attributes:
        seeds: the noise of each slot's request.
        target_cache: for drafters that read the target's KV.
        confidences: where the drafter of a chain stores its confidences; None if they are not used.
        span: times a named part of the drafter's work, within the stage that it belongs to: `with
            lab.span("look_up"): ...`.
    """

    run: Run
    limits: Limits
    seeds: SlotSeeds
    target_cache: PagedKVCache
    confidences: DraftConfidences | None = None
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def of(cls, models: Models, **own: Any) -> Lab:
        """Return the lab of an engine that has `own` beside the models that all engines share."""
        return cls(**{field.name: getattr(models, field.name) for field in fields(models)}, **own)

    @property
    def kept(self) -> PrunePolicy:
        """Which rows go on after their KV is written (`prune`)."""
        prune = self.run.prune
        return PrunePolicy(get("prune.prefill", prune.prefill)().build(), get("prune.catchup", prune.catchup)().build())

    @property
    def sampling(self) -> SamplingParams:
        """How the target samples."""
        sampling = self.run.sampling
        return SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p)

    def recorder(self) -> GraphRecorder:
        """Make the recorder that captures and replays graphs on the device."""
        return CudaGraphRecorder(self.device) if self.device.type == "cuda" else TapeRecorder()

    def cache(self, plans: Sequence[LayerPlan]) -> PagedKVCache:
        """Make the drafter's cache for layers with these plans, of the engine's pages and slots."""
        return build_cache(plans, self.limits, self, self.run.cache.drafter_dtype)

    def history(self) -> TokenHistory:
        """Make the token history of the engine's slots, for drafters that look drafts up."""
        return TokenHistory(self.limits.num_slots, self.limits.max_seq_len + self.limits.margin + 1, self.device)

    def picker(self, drafter: WeightsConfig) -> DraftPicker:
        """Make the picker of the drafter's tokens, which also stores confidences if they are used."""
        confidences = self.confidences
        if drafter.draft_sampling == DraftSampling.greedy:
            return GreedyPicker() if confidences is None else ConfidentGreedyPicker(confidences)
        kept = self._logits(drafter.num_draft_tokens)
        picker = SamplingPicker(self.run.sampling.temperature, self.seeds, kept, self.kernels)
        return picker if confidences is None else ConfidentPicker(picker, confidences)

    def tree(self) -> tuple[TreeShape[Any], SiblingPicker]:
        """Make the tree of a run that has one, and the picker of a branch's child tokens."""
        tree: Any = self.run.tree
        shape: TreeShape[Any] = tree.build(self)
        if not self.run.draws_drafts:
            return shape, LikeliestSiblings(shape.topk, self.kernels)
        paths, temperature = DraftPaths(tree.paths), self.run.sampling.temperature
        kept = self._logits(len(paths.branches))
        return shape, DrawnSiblings(
            paths, shape.topk, replacement=tree.replacement, temperature=temperature, seeds=self.seeds, kept=kept
        )

    def _logits(self, num_rows: int) -> DraftLogits:
        return DraftLogits(self.limits.num_slots, num_rows, self.target.vocab_size, self.device)
