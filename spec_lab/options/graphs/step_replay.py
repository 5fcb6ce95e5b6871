"""graph=step_replay: its keys, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import GraphConfig, knob
from spec_lab.menu.option import GraphOption

if TYPE_CHECKING:
    from spec_lab.engine.graphs.mode import GraphMode
    from spec_lab.wiring.graphs import GraphBuild


@dataclass
class StepReplayGraphConfig(GraphConfig):
    """graph=step_replay: a replay for each draft step, between which the host rebuilds metadata (vLLM #41162)."""

    name: str = "step_replay"
    verify: bool = knob(True, "capture the verify forward too, as a separate graph")


def build_mode(chosen: Chosen, options: StepReplayGraphConfig, build: GraphBuild) -> GraphMode:
    """Make graph=step_replay."""
    from spec_lab.engine.graphs.draft_loops import StepReplay

    return StepReplay(options.name, build.recorder(), build.num_slots, build.max_kv_len, options.verify, build.carry)


ROW = GraphOption(name="step_replay", schema=StepReplayGraphConfig, build=build_mode)
