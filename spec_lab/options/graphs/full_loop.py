"""graph=full_loop: its keys, and the function that makes it."""

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
class FullLoopGraphConfig(GraphConfig):
    """graph=full_loop: all draft steps in one graph (SGLang #25539, vLLM #46849)."""

    name: str = "full_loop"
    verify: bool = knob(True, "capture the verify forward too, as a separate graph")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "how metadata is updated between the draft steps of a graph")


def build_mode(chosen: Chosen, options: FullLoopGraphConfig, build: GraphBuild) -> GraphMode:
    """Make graph=full_loop."""
    from spec_lab.engine.graphs.draft_loops import FullLoop

    return FullLoop(options.name, build.recorder(), build.num_slots, build.max_kv_len, options.verify)


ROW = GraphOption(name="full_loop", schema=FullLoopGraphConfig, build=build_mode, runs_trees=True)
