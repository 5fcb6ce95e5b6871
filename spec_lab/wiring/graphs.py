"""Makes the graph mode for `graph=`, and the objects that advance metadata and run prompts in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from spec_lab.attention.stale import StaleMover
from spec_lab.core.errors import UserError
from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.engine.capture import CudaGraphRecorder, GraphRecorder
from spec_lab.engine.graphs.draft_loops import DraftCarry, carry_every_tensor
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.graphs.prompts import CapturedPromptPass
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.tape import TapeRecorder
from spec_lab.menu.choices import DraftMetadata
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.registry import made
from spec_lab.operators.kernel_set import KernelSet, Op
from spec_lab.wiring.limits import Limits
from spec_lab.wiring.models import TargetBuild


@dataclass(frozen=True, slots=True)
class GraphBuild:
    """The parts of one engine that a graph mode is made from.

    Attributes:
        carry: passes a draft step's results to the next step.
    """

    num_slots: int
    max_kv_len: int
    eos_token_ids: frozenset[int]
    device: torch.device
    kernels: KernelSet
    carry: DraftCarry

    def recorder(self) -> GraphRecorder:
        """Make the recorder that captures and replays graphs on the device."""
        return graph_recorder(self.device)


def graph_recorder(device: torch.device) -> GraphRecorder:
    """Make the recorder that captures and replays graphs on a device."""
    return CudaGraphRecorder(device) if device.type == "cuda" else TapeRecorder()


def build_graph_mode(chosen: Chosen, built: TargetBuild, limits: Limits) -> GraphMode:
    """Make the graph mode, with a recorder for the device.

    Raises:
        UserError: the mode advances attention metadata inside a graph, which the attention backend cannot do.
    """
    config = chosen.config
    moves_in_graph = hasattr(config.graph, "metadata")
    if moves_in_graph and not built.backend.supports_in_place_update:
        raise UserError(
            f"attention={config.attention.name} cannot move its metadata inside a graph, which "
            f"graph={config.graph.name} does; use graph=step_replay, which builds it again, or attention=torch"
        )
    general: DraftCarry = carry_every_tensor
    build = GraphBuild(
        limits.num_slots,
        limits.max_kv_len,
        built.target.eos_token_ids,
        built.device,
        built.kernels,
        # The kernel only carries tokens and a hidden state; for drafters that pass on anything else, use the torch
        # form.
        carry=built.kernels.get(Op.CARRY_HIDDEN, general) if chosen.drafter.hands_hidden_on else general,
    )
    return made(chosen.graph.build(chosen, config.graph, build), chosen.graph, "build")


def build_mover(chosen: Chosen, built: TargetBuild) -> MetadataMover:
    """Return the object that advances metadata between draft steps: the backend, or a deliberately wrong one with
    graph.metadata=stale."""
    if getattr(chosen.config.graph, "metadata", DraftMetadata.in_place) == DraftMetadata.stale:
        return StaleMover(built.backend)
    return built.backend


def prompt_pass_maker(chosen: Chosen, built: TargetBuild) -> Callable[..., PromptPass]:
    """Return the function that makes a prompt pass from a round, a pruning policy and sizes.

    Raises:
        UserError: prompts are to be captured, but layers of the target keep a state.
    """
    rounding = built.prompt_rounding
    if not getattr(chosen.config.graph, "prompts", False):
        return partial(PromptPass, rounding=rounding)
    if built.target.config.keeps_states:
        raise UserError("graph.prompts=true captures no prompt of a target that keeps states; use graph.prompts=false")
    return partial(CapturedPromptPass, graph_recorder(built.device), rounding=rounding)
