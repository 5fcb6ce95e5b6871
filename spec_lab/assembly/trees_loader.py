"""This module makes the tree that `tree=` names."""

from __future__ import annotations

from typing import Any

import torch

from spec_lab.assembly import registry
from spec_lab.assembly.trees import DynamicTreeConfig, StaticTreeConfig
from spec_lab.config import RunConfig
from spec_lab.drafters.growth import DynamicTree, StaticTree, TreeShape


def dynamic_tree(options: DynamicTreeConfig, device: torch.device) -> DynamicTree:
    """Makes tree=dynamic."""
    return DynamicTree(options.depth, options.num_rows, options.topk)


def static_tree(options: StaticTreeConfig, device: torch.device) -> StaticTree:
    """Makes tree=static."""
    return StaticTree(options.paths, device)


def build_tree_shape(config: RunConfig, device: torch.device) -> TreeShape[Any]:
    """The tree of a run that has one."""
    make = registry.of(config).tree(config).make
    assert make is not None, "only runs with a tree are asked"
    return make(config.tree, device)
