"""Everything that an extension may import: see `docs/extend.md`. Names that need torch are imported on first use.

An option's module, which is loaded for help and refusals, may only use the names that are imported at once, such as
option classes, base configs and `knob`. Modules that are imported only when a run builds the option may use all names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import (
    UserError as UserError,
)
from spec_lab.core.pruning_protocols import (
    Drop as Drop,
)
from spec_lab.core.pruning_protocols import (
    LayerRows as LayerRows,
)
from spec_lab.menu.choices import (
    Choice as Choice,
)
from spec_lab.menu.choices import (
    DraftSampling as DraftSampling,
)
from spec_lab.menu.choices import (
    DraftStop as DraftStop,
)
from spec_lab.menu.choices import (
    Weights as Weights,
)
from spec_lab.menu.chosen import (
    Chosen as Chosen,
)
from spec_lab.menu.config import (
    AcceptanceConfig as AcceptanceConfig,
)
from spec_lab.menu.config import (
    AttentionConfig as AttentionConfig,
)
from spec_lab.menu.config import (
    DrafterConfig as DrafterConfig,
)
from spec_lab.menu.config import (
    GraphConfig as GraphConfig,
)
from spec_lab.menu.config import (
    LoggerConfig as LoggerConfig,
)
from spec_lab.menu.config import (
    RunConfig as RunConfig,
)
from spec_lab.menu.config import (
    TargetConfig as TargetConfig,
)
from spec_lab.menu.config import (
    TrainedDrafterConfig as TrainedDrafterConfig,
)
from spec_lab.menu.config import (
    TreeConfig as TreeConfig,
)
from spec_lab.menu.config import (
    WorkloadConfig as WorkloadConfig,
)
from spec_lab.menu.config import (
    knob as knob,
)
from spec_lab.menu.option import (
    AttentionOption as AttentionOption,
)
from spec_lab.menu.option import (
    CatchupPruningOption as CatchupPruningOption,
)
from spec_lab.menu.option import (
    CheckerOption as CheckerOption,
)
from spec_lab.menu.option import (
    DrafterOption as DrafterOption,
)
from spec_lab.menu.option import (
    GraphOption as GraphOption,
)
from spec_lab.menu.option import (
    LoggerOption as LoggerOption,
)
from spec_lab.menu.option import (
    MetricOption as MetricOption,
)
from spec_lab.menu.option import (
    PromptPruningOption as PromptPruningOption,
)
from spec_lab.menu.option import (
    RuleOption as RuleOption,
)
from spec_lab.menu.option import (
    TargetOption as TargetOption,
)
from spec_lab.menu.option import (
    TreeOption as TreeOption,
)
from spec_lab.menu.option import (
    WorkloadOption as WorkloadOption,
)
from spec_lab.menu.readings import (
    Aspect as Aspect,
)
from spec_lab.menu.readings import (
    Reading as Reading,
)
from spec_lab.menu.registry import (
    Registry as Registry,
)

if TYPE_CHECKING:
    from spec_lab.acceptance.deterministic import (
        DeterministicRule as DeterministicRule,
    )
    from spec_lab.acceptance.emit import (
        emit as emit,
    )
    from spec_lab.acceptance.emit import (
        leading as leading,
    )
    from spec_lab.acceptance.emit import (
        only_offered as only_offered,
    )
    from spec_lab.acceptance.standing import (
        DraftStanding as DraftStanding,
    )
    from spec_lab.acceptance.standing import (
        round_standing as round_standing,
    )
    from spec_lab.core.draft_tree import (
        DraftTree as DraftTree,
    )
    from spec_lab.core.kv_cache import (
        CacheRow as CacheRow,
    )
    from spec_lab.core.kv_cache import (
        PagedKVCache as PagedKVCache,
    )
    from spec_lab.core.layer_protocols import (
        AttentionBackend as AttentionBackend,
    )
    from spec_lab.core.layer_protocols import (
        RowSelection as RowSelection,
    )
    from spec_lab.core.protocols import (
        AcceptanceRule as AcceptanceRule,
    )
    from spec_lab.core.protocols import (
        Drafter as Drafter,
    )
    from spec_lab.core.protocols import (
        DrafterRequirements as DrafterRequirements,
    )
    from spec_lab.core.protocols import (
        RuleTraits as RuleTraits,
    )
    from spec_lab.core.pruning_protocols import (
        CatchupPruning as CatchupPruning,
    )
    from spec_lab.core.pruning_protocols import (
        PromptPruning as PromptPruning,
    )
    from spec_lab.core.ragged import (
        attend as attend,
    )
    from spec_lab.core.selection import (
        AfterAttention as AfterAttention,
    )
    from spec_lab.core.selection import (
        AllRows as AllRows,
    )
    from spec_lab.core.selection import (
        BeforeAttention as BeforeAttention,
    )
    from spec_lab.core.tree_protocols import (
        TreeRule as TreeRule,
    )
    from spec_lab.core.types import (
        AcceptanceInputs as AcceptanceInputs,
    )
    from spec_lab.core.types import (
        DraftStep as DraftStep,
    )
    from spec_lab.core.types import (
        FeatureSpec as FeatureSpec,
    )
    from spec_lab.core.types import (
        NormSide as NormSide,
    )
    from spec_lab.core.types import (
        Request as Request,
    )
    from spec_lab.core.types import (
        Verification as Verification,
    )
    from spec_lab.core.types import (
        VerifiedRound as VerifiedRound,
    )
    from spec_lab.drafters.picking import (
        DraftPicker as DraftPicker,
    )
    from spec_lab.drafters.picking import (
        GivenDrafts as GivenDrafts,
    )
    from spec_lab.engine.graphs.mode import (
        GraphMode as GraphMode,
    )
    from spec_lab.record.recorder import (
        Sink as Sink,
    )
    from spec_lab.wiring.attention import (
        BackendContext as BackendContext,
    )
    from spec_lab.wiring.caches import (
        build_cache as build_cache,
    )
    from spec_lab.wiring.drafting import (
        DrafterFactory as DrafterFactory,
    )
    from spec_lab.wiring.drafting import (
        DrafterResources as DrafterResources,
    )
    from spec_lab.wiring.drafting import (
        make_picker as make_picker,
    )
    from spec_lab.wiring.graphs import (
        GraphBuild as GraphBuild,
    )
    from spec_lab.wiring.models import (
        DrafterBuild as DrafterBuild,
    )
    from spec_lab.wiring.rules import (
        RuleBuild as RuleBuild,
    )
    from spec_lab.wiring.rules import (
        RuleContext as RuleContext,
    )

WITH_TORCH = {
    "spec_lab.acceptance.deterministic": ("DeterministicRule",),
    "spec_lab.acceptance.emit": ("emit", "leading", "only_offered"),
    "spec_lab.acceptance.standing": ("DraftStanding", "round_standing"),
    "spec_lab.core.draft_tree": ("DraftTree",),
    "spec_lab.core.kv_cache": ("CacheRow", "PagedKVCache"),
    "spec_lab.core.layer_protocols": ("AttentionBackend", "RowSelection"),
    "spec_lab.core.protocols": ("AcceptanceRule", "Drafter", "DrafterRequirements", "RuleTraits"),
    "spec_lab.core.pruning_protocols": ("CatchupPruning", "PromptPruning"),
    "spec_lab.core.ragged": ("attend",),
    "spec_lab.core.tree_protocols": ("TreeRule",),
    "spec_lab.core.types": (
        "AcceptanceInputs",
        "DraftStep",
        "FeatureSpec",
        "NormSide",
        "Request",
        "Verification",
        "VerifiedRound",
    ),
    "spec_lab.drafters.picking": ("DraftPicker", "GivenDrafts"),
    "spec_lab.engine.graphs.mode": ("GraphMode",),
    "spec_lab.core.selection": ("AfterAttention", "AllRows", "BeforeAttention"),
    "spec_lab.record.recorder": ("Sink",),
    "spec_lab.wiring.attention": ("BackendContext",),
    "spec_lab.wiring.caches": ("build_cache",),
    "spec_lab.wiring.drafting": ("DrafterFactory", "DrafterResources", "make_picker"),
    "spec_lab.wiring.graphs": ("GraphBuild",),
    "spec_lab.wiring.models": ("DrafterBuild",),
    "spec_lab.wiring.rules": ("RuleBuild", "RuleContext"),
}
"""The names that are imported on first use, by their module; most of these modules need torch."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in WITH_TORCH.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(module), name)
