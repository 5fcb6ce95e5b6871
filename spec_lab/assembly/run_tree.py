"""Says of a run with a tree that its depth stands for K. Imports no torch."""

from __future__ import annotations

import dataclasses

from spec_lab.assembly import registry
from spec_lab.assembly.option import TreeOption
from spec_lab.config import RunConfig


def with_depth_as_k(config: RunConfig) -> RunConfig:
    """Return the same run with K as deep as its tree, unless somebody set K: what then differs is refused."""
    name = config.tree.name
    options = registry.load(config.extensions).options(TreeOption)
    if name not in options or (sizes := options[name].sizes) is None:
        return config
    drafter = config.drafter
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "num_draft_tokens")
    if drafter.num_draft_tokens != usual or usual == 0:
        return config
    drafter = dataclasses.replace(drafter, num_draft_tokens=sizes(config.tree).depth)
    return dataclasses.replace(config, drafter=drafter)
