"""From a configuration to parts. The only place where an option's name chooses a class."""

from spec_lab.assembly.acceptance import ACCEPTANCE, RuleContext, build_deterministic_rule
from spec_lab.assembly.drafters import DRAFTERS, load_drafter
from spec_lab.assembly.engine import (
    UNPRUNED,
    build_engine,
    build_prune_policy,
    plain_config,
    unpruned_config,
)
from spec_lab.assembly.graphs import GRAPH
from spec_lab.assembly.kernels import KERNELS
from spec_lab.assembly.models import (
    ATTENTION,
    ZOO,
    Limits,
    Models,
    build_cache,
    engine_limits,
    load_models,
    resolve_device,
    resolve_dtype,
    target_folder,
    thinking_markers,
)

__all__ = [
    "ACCEPTANCE",
    "ATTENTION",
    "DRAFTERS",
    "GRAPH",
    "KERNELS",
    "UNPRUNED",
    "ZOO",
    "Limits",
    "Models",
    "RuleContext",
    "build_cache",
    "build_deterministic_rule",
    "build_engine",
    "build_prune_policy",
    "engine_limits",
    "load_drafter",
    "load_models",
    "plain_config",
    "resolve_device",
    "resolve_dtype",
    "target_folder",
    "thinking_markers",
    "unpruned_config",
]
