"""The graph modes: which stretches of a round are captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.config.choices import DraftMetadata
from spec_lab.config.groups import GraphConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.engine.graphs.mode import GraphMode


@option("graph", "auto")
class AutoGraph(GraphConfig):
    """On a CUDA device graph=round where nothing speaks against it, else graph=eager: `spec_lab.build.auto`."""

    captures = False


@option("graph", "eager")
class EagerGraph(GraphConfig):
    """Nothing is captured."""

    captures = False

    def build(self, lab: Lab) -> GraphMode:
        from spec_lab.engine.graphs.eager import EagerGraph

        return EagerGraph()


@dataclass
class DraftLoopConfig(GraphConfig):
    """The key of the modes that capture draft steps apart from verify."""

    verify: bool = knob(True, "capture the verify forward too, as a separate graph")

    def made(self, make: Callable[..., GraphMode], lab: Lab, **more: Any) -> GraphMode:
        """Call `make` with what all of them are made from."""
        return make(
            self.name,
            lab.recorder(),
            num_slots=lab.limits.num_slots,
            max_kv_len=lab.limits.max_kv_len,
            capture_verify=self.verify,
            **more,
        )


@option("graph", "split_seed")
class SplitSeed(DraftLoopConfig):
    """First draft step eager, the others in one graph (SGLang before #25539)."""

    metadata: DraftMetadata = knob(DraftMetadata.in_place, "how metadata is updated between the draft steps of a graph")

    def build(self, lab: Lab) -> GraphMode:
        from spec_lab.engine.graphs.draft_loops import SplitSeed

        return self.made(SplitSeed, lab)


@option("graph", "step_replay")
class StepReplay(DraftLoopConfig):
    """A replay for each draft step, between which the host rebuilds metadata (vLLM #41162)."""

    runs_trees = False

    def check(self, run: Run) -> Iterator[str]:
        if run.drafter.one_pass:
            yield (
                f"drafter={run.drafter.name} drafts in one pass, so graph=step_replay has no draft step to replay; use "
                "graph=full_loop"
            )

    def build(self, lab: Lab) -> GraphMode:
        from spec_lab.core.kernel_set import Op
        from spec_lab.engine.graphs.draft_loops import DraftCarry, StepReplay, carry_every_tensor

        carry: DraftCarry = carry_every_tensor
        if lab.run.drafter.hands_hidden_on:  # the kernel carries tokens and a hidden state alone
            carry = lab.kernels.get(Op.CARRY_HIDDEN, carry)
        return self.made(StepReplay, lab, carry=carry)


@option("graph", "full_loop")
class FullLoop(DraftLoopConfig):
    """All draft steps in one graph (SGLang #25539, vLLM #46849)."""

    metadata: DraftMetadata = knob(DraftMetadata.in_place, "how metadata is updated between the draft steps of a graph")

    def build(self, lab: Lab) -> GraphMode:
        from spec_lab.engine.graphs.draft_loops import FullLoop

        return self.made(FullLoop, lab)


@option("graph", "round")
class RoundGraph(GraphConfig):
    """Verify, accept and all draft steps in one graph."""

    overlap: bool = knob(False, "the host reads a round's tokens only after it has launched the next round")
    metadata: DraftMetadata = knob(DraftMetadata.in_place, "how metadata is updated between the draft steps of a graph")
    rounds_per_replay: int = knob(
        1,
        "number of rounds in one graph; the device ends requests, and the host reads all tokens at the end",
        least=1,
        most=64,
    )
    prompts: bool | None = knob(
        None, "capture the prompt pass of a single prompt of up to 512 tokens too; null is where it can be, on a GPU"
    )

    def build(self, lab: Lab) -> GraphMode:
        from spec_lab.engine.graphs.captured import WholeRound
        from spec_lab.engine.graphs.several_rounds import SeveralRounds
        from spec_lab.engine.stops import StopConditions

        recorder, num_slots, max_kv_len = lab.recorder(), lab.limits.num_slots, lab.limits.max_kv_len
        if self.rounds_per_replay == 1:
            return WholeRound(self.name, recorder, num_slots, max_kv_len)
        stops = StopConditions(num_slots, lab.target.eos_token_ids, lab.device, lab.kernels)
        return SeveralRounds(
            self.name,
            recorder,
            num_slots,
            max_kv_len,
            num_rounds=self.rounds_per_replay,
            stops=stops,
            ahead=self.overlap,
        )


@option("graph", "round_overlap")
class RoundOverlap(RoundGraph):
    """The same, and the host reads a round's tokens only after it has launched the next round."""

    overlap: bool = True
