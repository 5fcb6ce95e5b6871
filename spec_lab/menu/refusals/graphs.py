"""Checks graph modes. Each function is a check, as in `menu.refusals.run`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.menu.choices import ByRequest, DraftMetadata
from spec_lab.menu.chosen import Chosen


def captured_drafter(chosen: Chosen) -> str | None:
    """A drafter may refuse modes that capture, since it has no draft loop; its `no_loop` says why."""
    drafter, graph = chosen.drafter, chosen.graph
    if not graph.captures or drafter.no_loop is None:
        return None
    return (
        f"drafter={drafter.name} {drafter.no_loop}, so graph={graph.name} would capture no draft loop; "
        "use graph=eager or drafter=eagle3"
    )


def stale_metadata_shows(chosen: Chosen) -> str | None:
    """Stale metadata needs a drafter whose metadata is advanced between draft steps."""
    config = chosen.config
    if getattr(config.graph, "metadata", None) != DraftMetadata.stale:
        return None
    reason = chosen.drafter.no_moves
    if reason is None and config.drafter.num_draft_tokens == 1:
        reason = "has one draft step"
    if reason is None:
        return None
    return (
        f"graph.metadata=stale changes nothing with drafter={config.drafter.name}, which {reason}; "
        "use graph.metadata=in_place, or drafter=eagle3 with drafter.num_draft_tokens=3"
    )


def something_is_captured(chosen: Chosen) -> str | None:
    """If verify is not captured, there must be more draft steps than the mode launches from Python."""
    config = chosen.config
    graph, fewest = config.graph, chosen.offers.smallest_k
    num_launched = chosen.graph.num_launched
    if num_launched is None or getattr(graph, "verify", True) or fewest > num_launched:
        return None
    knob = f"drafter.num_draft_tokens={fewest}"
    if config.drafter.k_schedule is not None:
        knob = f"a K of {fewest} in drafter.k_schedule"
    return (
        f"graph={graph.name} graph.verify=false captures nothing with drafter={config.drafter.name} {knob}; "
        "use graph.verify=true, or graph=eager without graph.verify"
    )


def recorded_rows_need_eager(chosen: Chosen) -> str | None:
    """Recording verify rows needs eager mode, since they are recorded between the stages of a round."""
    topk, graph = chosen.config.record.topk, chosen.graph
    if topk < 1 or not graph.captures:
        return None
    return (
        f"record.topk={topk} reads each verify row between the stages of a round, but graph={graph.name} replays "
        "captured stages; use graph=eager or record.topk=0"
    )


def rounds_follow_each_other(chosen: Chosen) -> str | None:
    """Several rounds in one graph run without the host, so nothing may need the host between them. Skipping rounds
    needs several."""
    config = chosen.config
    num_rounds = getattr(config.graph, "rounds_per_replay", 1)
    if num_rounds == 1:
        if getattr(config.graph, "skip_ended", False):
            return "graph.skip_ended=true skips rounds in a replay of several; add graph.rounds_per_replay=8"
        return None
    if config.drafter.k_schedule is not None:
        return (
            "drafter.k_schedule: the host chooses K by the running requests before every round, but "
            f"graph.rounds_per_replay={num_rounds} runs rounds without the host; use graph.rounds_per_replay=1"
        )
    by_request = config.drafter.by_request
    if by_request != ByRequest.same:
        return (
            f"drafter.by_request={by_request}: the host looks at each request before every round, but "
            f"graph.rounds_per_replay={num_rounds} runs rounds without the host; use graph.rounds_per_replay=1"
        )
    if chosen.drafter.drafts_on_host:
        return (
            f"drafter={config.drafter.name} drafts on the host between two rounds, but "
            f"graph.rounds_per_replay={num_rounds} runs rounds without the host; use graph.rounds_per_replay=1"
        )
    return None


def host_drafts_need_the_tokens(chosen: Chosen) -> str | None:
    """A drafter on the host must read a round's tokens before the next round, which overlap would launch too early."""
    if not chosen.drafter.drafts_on_host or not getattr(chosen.config.graph, "overlap", False):
        return None
    return (
        f"drafter={chosen.drafter.name} drafts from the tokens of the round before, which graph.overlap=true reads too "
        "late; use graph.overlap=false"
    )


def captured_prompts(chosen: Chosen) -> str | None:
    """A captured prompt pass has a fixed number of rows, and needs a drafter of chains of K drafts."""
    config = chosen.config
    drafter = chosen.drafter
    if not getattr(config.graph, "prompts", False):
        return None
    captures, remedy = "graph.prompts=true captures no prompts of", "use graph.prompts=false"
    if not drafter.ingests_in_graphs:
        return f"{captures} drafter={drafter.name}; {remedy} or drafter=eagle3"
    if chosen.sizes is not None:
        return f"{captures} tree={config.tree.name}; {remedy} or tree=none"
    return f"{captures} a run with {chosen.offers.named}; {remedy}" if chosen.offers.may_be_fewer else None


GRAPH_CHECKS: tuple[Callable[[Chosen], str | None], ...] = (
    captured_drafter,
    stale_metadata_shows,
    something_is_captured,
    captured_prompts,
    recorded_rows_need_eager,
    rounds_follow_each_other,
    host_drafts_need_the_tokens,
)
