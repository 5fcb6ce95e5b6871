"""Makes what a graph mode changes beside itself: the object that advances metadata, and the one that runs prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spec_lab.attention.stale import StaleMover
from spec_lab.build.lab import graph_recorder
from spec_lab.build.models import Models
from spec_lab.config.choices import DraftMetadata
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.engine.graphs.prompts import CapturedPromptPass
from spec_lab.engine.prefill import PromptPass


def build_mover(run: Run, models: Models) -> MetadataMover:
    """Return the object that advances metadata between draft steps: the backend, or a deliberately wrong one with
    graph.metadata=stale.

    Raises:
        UserError: the mode advances attention metadata inside a graph, which the attention backend cannot do.
    """
    metadata = getattr(run.graph, "metadata", None)
    if metadata is not None and not models.backend.supports_in_place_update:
        raise UserError(
            f"attention={run.attention.name} cannot move its metadata inside a graph, which graph={run.graph.name} "
            "does; use graph=step_replay, which builds it again, or attention=torch"
        )
    return StaleMover(models.backend) if metadata == DraftMetadata.stale else models.backend


def prompt_pass_maker(run: Run, models: Models) -> Callable[..., PromptPass]:
    """Return the function that makes a prompt pass from a round, a pruning policy and sizes.

    Raises:
        UserError: prompts are to be captured, but layers of the target keep a state.
    """
    rounding = models.prompt_rounding
    if not getattr(run.graph, "prompts", False):
        return partial(PromptPass, rounding=rounding)
    if models.target.config.keeps_states:
        raise UserError("graph.prompts=true captures no prompt of a target that keeps states; use graph.prompts=false")
    return partial(CapturedPromptPass, graph_recorder(models.device), rounding=rounding)
