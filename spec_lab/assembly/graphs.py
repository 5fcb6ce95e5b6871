"""The graph modes: their keys, and a row for each."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.option import GraphOption
from spec_lab.config import Choice, GraphConfig, knob

LOADER = "spec_lab.assembly.graphs_loader"


class DraftMetadata(Choice):
    """The ways in which attention metadata moves between the draft steps of a graph."""

    in_place = "in_place"
    stale = "stale", "wrong on purpose"


@dataclass
class AutoGraphConfig(GraphConfig):
    """graph=auto: one of the others, which `spec_lab.compatibility.auto` chooses when a run is composed."""

    name: str = "auto"


@dataclass
class EagerGraphConfig(GraphConfig):
    """graph=eager: nothing is captured."""

    name: str = "eager"


@dataclass
class StepReplayGraphConfig(GraphConfig):
    """graph=step_replay: one draft step captured, its metadata rebuilt on the host between replays (vLLM #41162)."""

    name: str = "step_replay"
    verify: bool = knob(True, "capture the verify forward too, as a graph of its own")


@dataclass
class SplitSeedGraphConfig(GraphConfig):
    """graph=split_seed: first draft step eager, the others in one graph (SGLang before #25539)."""

    name: str = "split_seed"
    verify: bool = knob(True, "capture the verify forward too, as a graph of its own")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "between the draft steps of a graph")


@dataclass
class FullLoopGraphConfig(GraphConfig):
    """graph=full_loop: all draft steps in one graph (SGLang #25539, vLLM #46849)."""

    name: str = "full_loop"
    verify: bool = knob(True, "capture the verify forward too, as a graph of its own")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "between the draft steps of a graph")


@dataclass
class RoundGraphConfig(GraphConfig):
    """graph=round: verify, accept and all draft steps in one graph."""

    name: str = "round"
    overlap: bool = knob(False, "the host reads a round's tokens only after it has launched the next round")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "between the draft steps of a graph")
    rounds_per_replay: int = knob(
        1, "rounds in one graph; the device sees requests end, the host reads the tokens of all", least=1, most=64
    )
    prompts: bool = knob(False, "the pass of a prompt of up to 512 tokens that comes alone is one graph too")
    skip_ended: bool = knob(
        False, "skip rounds of a replay behind the end of all requests; stages are timed in its first round alone"
    )


OPTIONS = (
    GraphOption(
        name="eager",
        schema=EagerGraphConfig,
        build=Deferred(LOADER, "eager"),
        num_launched=None,
        runs_trees=True,
    ),
    GraphOption(
        name="split_seed",
        schema=SplitSeedGraphConfig,
        build=Deferred(LOADER, "split_seed"),
        num_launched=1,
        runs_trees=True,
    ),
    GraphOption(name="step_replay", schema=StepReplayGraphConfig, build=Deferred(LOADER, "step_replay")),
    GraphOption(name="full_loop", schema=FullLoopGraphConfig, build=Deferred(LOADER, "full_loop"), runs_trees=True),
    GraphOption(name="round", schema=RoundGraphConfig, build=Deferred(LOADER, "whole_round"), runs_trees=True),
)
