"""What cannot work together, for graph modes. Pure functions like those of `compatibility`; imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.config import RunConfig, SplitSeedGraphConfig
from spec_lab.errors import not_among

EAGER = "eager"
METADATA = ("in_place", "stale")
WITHOUT_A_LOOP = {
    "ngram": "looks its drafts up",
    "oracle": "replays a continuation",
    "random": "draws its drafts",
}

WITHOUT_MOVES = {
    "frozen_kv": "stands at one position in all its steps",
    "mtp_vanilla": "runs every module over the same positions",
}


def captured_drafter(config: RunConfig) -> str | None:
    name, graph = config.drafter.name, config.graph.name
    if graph == EAGER or name not in WITHOUT_A_LOOP:
        return None
    return (
        f"drafter={name} {WITHOUT_A_LOOP[name]}, so graph={graph} would capture no draft loop; "
        "use graph=eager or drafter=eagle3"
    )


def graph_metadata(config: RunConfig) -> str | None:
    metadata = getattr(config.graph, "metadata", None)
    return None if metadata is None else not_among("graph.metadata", metadata, METADATA)


def stale_metadata_shows(config: RunConfig) -> str | None:
    """Where nothing moves between draft steps, nothing can be left behind."""
    drafter = config.drafter
    if getattr(config.graph, "metadata", None) != "stale":
        return None
    reason = WITHOUT_MOVES.get(drafter.name) or (
        "has one draft step"
        if drafter.num_draft_tokens == 1
        else "has no draft steps"
        if drafter.name == "none"
        else None
    )
    if reason is None:
        return None
    return (
        f"graph.metadata=stale changes nothing with drafter={drafter.name}, which {reason}; "
        "use graph.metadata=in_place, or drafter=eagle3 with drafter.num_draft_tokens=3"
    )


def something_is_captured(config: RunConfig) -> str | None:
    """Without verify there must be draft steps in a graph; `split_seed` launches the first of them."""
    graph, num_draft_tokens = config.graph, config.drafter.num_draft_tokens
    num_launched = 1 if isinstance(graph, SplitSeedGraphConfig) else 0
    if getattr(graph, "verify", True) or num_draft_tokens > num_launched:
        return None
    return (
        f"graph={graph.name} graph.verify=false captures nothing with drafter={config.drafter.name} "
        f"drafter.num_draft_tokens={num_draft_tokens}; use graph.verify=true or graph=eager"
    )


def recorded_rows_need_eager(config: RunConfig) -> str | None:
    topk, graph = config.record.topk, config.graph.name
    if topk < 1 or graph == EAGER:
        return None
    return (
        f"record.topk={topk} reads each verify row between the stages of a round, which graph={graph} replays as it "
        "was captured; use graph=eager or record.topk=0"
    )


GRAPH_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (
    captured_drafter,
    graph_metadata,
    stale_metadata_shows,
    something_is_captured,
    recorded_rows_need_eager,
)
