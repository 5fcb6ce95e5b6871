"""graph=round: its keys, and the function that makes it."""

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
class RoundGraphConfig(GraphConfig):
    """graph=round: verify, accept and all draft steps in one graph."""

    name: str = "round"
    overlap: bool = knob(False, "the host reads a round's tokens only after it has launched the next round")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "how metadata is updated between the draft steps of a graph")
    rounds_per_replay: int = knob(
        1,
        "number of rounds in one graph; the device ends requests, and the host reads all tokens at the end",
        least=1,
        most=64,
    )
    prompts: bool = knob(False, "capture the prompt pass of a single prompt of up to 512 tokens too")
    skip_ended: bool = knob(
        False,
        "skip the rest of a replay once all requests have ended; stages are timed only in the first round of a replay",
    )


def build_mode(chosen: Chosen, options: RoundGraphConfig, build: GraphBuild) -> GraphMode:
    """Make graph=round."""
    from spec_lab.engine.graphs.captured import WholeRound
    from spec_lab.engine.graphs.several_rounds import SeveralRounds
    from spec_lab.engine.graphs.skipped_rounds import SkippedRounds
    from spec_lab.engine.stops import StopConditions

    recorder = build.recorder()
    if options.rounds_per_replay == 1:
        return WholeRound(options.name, recorder, build.num_slots, build.max_kv_len)
    stops = StopConditions(build.num_slots, build.eos_token_ids, build.device, build.kernels)
    make = SkippedRounds if options.skip_ended else SeveralRounds
    return make(
        options.name, recorder, build.num_slots, build.max_kv_len, options.rounds_per_replay, stops, options.overlap
    )


ROW = GraphOption(name="round", schema=RoundGraphConfig, build=build_mode, runs_trees=True)
