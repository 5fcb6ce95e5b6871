"""This module makes the graph mode that `graph=` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.graphs import (
    DraftMetadata,
    EagerGraphConfig,
    FullLoopGraphConfig,
    RoundGraphConfig,
    SplitSeedGraphConfig,
    StepReplayGraphConfig,
)
from spec_lab.assembly.limits import Limits
from spec_lab.assembly.models import Models
from spec_lab.attention.stale import StaleMover
from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.engine.capture import CudaGraphRecorder, GraphRecorder
from spec_lab.engine.graphs.draft_loops import DraftCarry, FullLoop, SplitSeed, StepReplay, carry_every_tensor
from spec_lab.engine.graphs.eager import EagerGraph
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.graphs.prompts import CapturedPromptPass
from spec_lab.engine.graphs.several_rounds import SeveralRounds
from spec_lab.engine.graphs.skipped_rounds import SkippedRounds
from spec_lab.engine.graphs.whole_round import WholeRound
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.stops import StopConditions
from spec_lab.engine.tape import TapeRecorder
from spec_lab.errors import UserError


def build_graph_mode(chosen: Chosen, models: Models, limits: Limits) -> GraphMode:
    """Make the mode, with a recorder of the device.

    Raises:
        UserError: the mode moves attention metadata inside a graph, and the attention backend cannot.
    """
    config = chosen.config
    moves_in_graph = hasattr(config.graph, "metadata")
    if moves_in_graph and not models.backend.supports_in_place_update:
        raise UserError(
            f"attention={config.attention.name} cannot move its metadata inside a graph, which "
            f"graph={config.graph.name} does; use graph=step_replay, which builds it anew, or attention=torch"
        )
    return chosen.graph.build(chosen, config.graph, models, limits)


def build_mover(chosen: Chosen, models: Models) -> MetadataMover:
    """Return what moves metadata between draft steps: the backend, or with graph.metadata=stale a wrong one."""
    if getattr(chosen.config.graph, "metadata", DraftMetadata.in_place) == DraftMetadata.stale:
        return StaleMover(models.backend)
    return models.backend


def prompt_pass_maker(chosen: Chosen, models: Models) -> Callable[..., PromptPass]:
    """Return what makes the prompt pass of a round, a pruning policy and sizes.

    Raises:
        UserError: prompts are to be captured, and layers of the target keep a state.
    """
    if not getattr(chosen.config.graph, "prompts", False):
        return PromptPass
    if models.target.config.keeps_states:
        raise UserError("graph.prompts=true captures no prompt of a target that keeps states; use graph.prompts=false")
    return partial(CapturedPromptPass, _recorder(models))


def _carry(chosen: Chosen, models: Models) -> DraftCarry:
    """The kernel takes tokens and a hidden state; a drafter that hands on anything else keeps the general way."""
    return models.kernels.carry_hidden if chosen.drafter.hands_hidden_on else carry_every_tensor


def _recorder(models: Models) -> GraphRecorder:
    return CudaGraphRecorder(models.device) if models.device.type == "cuda" else TapeRecorder()


def eager(chosen: Chosen, options: EagerGraphConfig, models: Models, limits: Limits) -> GraphMode:
    """Make graph=eager."""
    return EagerGraph()


def split_seed(chosen: Chosen, options: SplitSeedGraphConfig, models: Models, limits: Limits) -> GraphMode:
    """Make graph=split_seed."""
    return SplitSeed(options.name, _recorder(models), limits.num_slots, limits.max_kv_len, options.verify)


def step_replay(chosen: Chosen, options: StepReplayGraphConfig, models: Models, limits: Limits) -> GraphMode:
    """Make graph=step_replay."""
    carry = _carry(chosen, models)
    return StepReplay(options.name, _recorder(models), limits.num_slots, limits.max_kv_len, options.verify, carry)


def full_loop(chosen: Chosen, options: FullLoopGraphConfig, models: Models, limits: Limits) -> GraphMode:
    """Make graph=full_loop."""
    return FullLoop(options.name, _recorder(models), limits.num_slots, limits.max_kv_len, options.verify)


def whole_round(chosen: Chosen, options: RoundGraphConfig, models: Models, limits: Limits) -> GraphMode:
    """Make graph=round."""
    places = options.name, _recorder(models), limits.num_slots, limits.max_kv_len
    if options.rounds_per_replay == 1:
        return WholeRound(*places)
    stops = StopConditions(limits.num_slots, models.target.eos_token_ids, models.device, models.kernels.going_on)
    make = SkippedRounds if options.skip_ended else SeveralRounds
    return make(*places, options.rounds_per_replay, stops, options.overlap)
