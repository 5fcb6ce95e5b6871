"""graph=split_seed: its keys, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.choices import DraftMetadata
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import GraphConfig, knob
from spec_lab.menu.option import GraphOption

if TYPE_CHECKING:
    from spec_lab.engine.graphs.mode import GraphMode
    from spec_lab.wiring.graphs import GraphBuild


@dataclass
class SplitSeedGraphConfig(GraphConfig):
    """graph=split_seed: first draft step eager, the others in one graph (SGLang before #25539)."""

    name: str = "split_seed"
    verify: bool = knob(True, "capture the verify forward too, as a separate graph")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "how metadata is updated between the draft steps of a graph")


def build_mode(chosen: Chosen, options: SplitSeedGraphConfig, build: GraphBuild) -> GraphMode:
    """Make graph=split_seed."""
    from spec_lab.engine.graphs.draft_loops import SplitSeed

    return SplitSeed(options.name, build.recorder(), build.num_slots, build.max_kv_len, options.verify)


ROW = GraphOption(name="split_seed", schema=SplitSeedGraphConfig, build=build_mode, num_launched=1, runs_trees=True)
