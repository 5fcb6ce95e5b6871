"""graph=eager: its keys, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import GraphConfig
from spec_lab.menu.option import GraphOption

if TYPE_CHECKING:
    from spec_lab.engine.graphs.mode import GraphMode
    from spec_lab.wiring.graphs import GraphBuild


@dataclass
class EagerGraphConfig(GraphConfig):
    """graph=eager: nothing is captured."""

    name: str = "eager"


def build_mode(chosen: Chosen, options: EagerGraphConfig, build: GraphBuild) -> GraphMode:
    """Make graph=eager."""
    from spec_lab.engine.graphs.eager import EagerGraph

    return EagerGraph()


ROW = GraphOption(name="eager", schema=EagerGraphConfig, build=build_mode, num_launched=None, runs_trees=True)
