"""Makes the drafter of a head that is run draft by draft, such as that of EAGLE-3 or an MTP module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.checkpoints.plan import LayerPlan
    from spec_lab.config.groups import TrainedDrafterConfig
    from spec_lab.core.protocols import Drafter
    from spec_lab.core.types import FeatureSpec


def recurrent_drafter(
    option: TrainedDrafterConfig,
    lab: Lab,
    head: Any,
    features: FeatureSpec,
    *,
    plan: LayerPlan,
    num_scored: int | None = None,
) -> Drafter[Any]:
    """Make the drafter of one engine: of chains, or of the branches of the run's tree.

    Args:
        features: what the head reads of the target.
        plan: of the head's layer.
        num_scored: how many tokens the head scores, if they are not the target's.
    """
    from spec_lab.build.caches import attention_kinds
    from spec_lab.drafters.recurrent import RecurrentDrafter, RecurrentTreeDrafter

    cache = lab.cache([plan]).layers[0]
    if lab.run.sizes is None:
        return RecurrentDrafter(
            num_draft_tokens=option.num_draft_tokens,
            head=head,
            features=features,
            cache=cache,
            backend=lab.backend,
            prune=lab.kept,
            picker=lab.picker(option),
            kernels=lab.kernels,
            kinds=attention_kinds([plan]),
        )
    shape = lab.tree(num_scored)
    return RecurrentTreeDrafter(
        num_draft_tokens=shape.depth,
        shape=shape,
        siblings=lab.siblings(shape),
        head=head,
        features=features,
        cache=cache,
        backend=lab.tree_backend,
        prune=lab.kept,
    )
