"""Builds the engine of a configuration, and its decode rounds.

A round drafts a chain or a tree, or nothing. It verifies all drafts, or only those that each request offers.
"""

from __future__ import annotations

import dataclasses

from spec_lab.acceptance.confidences import DraftConfidences, RowConfidences
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.core.errors import UserError
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.drafts import Chain, Tree, TreeParts
from spec_lab.engine.engine import Engine
from spec_lab.engine.host_drafts import HostDrafts
from spec_lab.engine.offered import DraftOffers, RowOffers
from spec_lab.engine.offers import AllOffered, Counted, CountedRows
from spec_lab.engine.pages import PageAllocator, PageTable
from spec_lab.engine.parts import Parts
from spec_lab.engine.plain_round import PlainRound
from spec_lab.engine.request_k import GivenK, RequestK, RequestLimits, RunningK
from spec_lab.engine.round import DecodeRound, Rounds
from spec_lab.engine.scheduler import Scheduler
from spec_lab.engine.slots import SlotState
from spec_lab.engine.states import slot_states
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.engine.timing import make_timer
from spec_lab.menu.choices import ByRequest
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig
from spec_lab.menu.registry import made
from spec_lab.wiring.caches import build_cache
from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
from spec_lab.wiring.graphs import build_graph_mode, build_mover, prompt_pass_maker
from spec_lab.wiring.limits import Limits, overlaps
from spec_lab.wiring.models import TargetBuild
from spec_lab.wiring.rules import RuleBuild, build_rule


def build_prune_policy(chosen: Chosen) -> PrunePolicy:
    """Make the pruning policy from `prune.prefill` and `prune.catchup`."""
    prefill = made(chosen.prefill.make(), chosen.prefill, "make")
    catchup = made(chosen.catchup.make(), chosen.catchup, "make")
    return PrunePolicy(prefill, catchup, chosen.catchup.drop)


def build_engine(chosen: Chosen, built: TargetBuild, make_drafter: DrafterFactory, limits: Limits) -> Engine:
    """Make an engine with its own KV cache, slots and scheduler. The loaded target is shared."""
    config, sizes = chosen.config, chosen.sizes
    prune = build_prune_policy(chosen)
    if prune.needs_prewrite and not built.backend.prewrite:
        raise UserError(
            f"attention={config.attention.name} cannot write KV before attention, which prune.prefill=last_row and "
            "prune.catchup=pre_attention need; use prune=none or attention=torch"
        )
    seeds = SlotSeeds(limits.num_slots, config.seed, built.device)
    rule = build_rule(chosen, _rule_build(chosen, built, limits, seeds))
    num_verified = config.drafter.num_draft_tokens + 1
    limits = dataclasses.replace(limits, num_rows=num_verified, rollback=config.recurrent.rollback)
    cache = build_cache(built.target.layer_plans, limits, built)
    confidences = build_confidences(chosen, limits, built)
    row_confidences = build_row_confidences(chosen, limits, built)
    timer = make_timer(built.device)
    resources = DrafterResources(limits, prune, seeds, cache, confidences, row_confidences, timer.span)
    drafter = made(make_drafter(resources), chosen.drafter, "what load returns")
    assert limits.margin >= 2 * drafter.num_draft_tokens
    num_rows = drafter.num_draft_tokens + 1 if sizes is None else sizes.num_rows
    table = PageTable(limits.num_slots, limits.max_seq_len + limits.margin, limits.page_size, built.device)
    parts = Parts(
        target=built.target,
        drafter=drafter,
        rule=rule,
        backend=built.backend,
        mover=build_mover(chosen, built),
        cache=cache,
        slots=SlotState(limits.num_slots, num_rows - 1, table, slot_states(cache), built.kernels),
        timer=timer,
        experts_read=built.experts_read,
    )
    allocator = PageAllocator(limits.num_pages)
    scheduler = Scheduler(
        limits.num_slots,
        allocator,
        limits.page_size,
        limits.max_seq_len,
        limits.margin,
        config.workload.max_in_flight,
    )
    graph = build_graph_mode(chosen, built, limits)
    return Engine(
        build_rounds(chosen, parts, resources, graph.recorder, built),
        prune,
        graph,
        scheduler,
        config.cache.chunk_size,
        config.cache.prefill_tokens,
        overlaps(config),
        prompt_pass_maker(chosen, built),
    )


def build_confidences(chosen: Chosen, limits: Limits, built: TargetBuild) -> DraftConfidences | None:
    """Make the buffers for the drafter's confidences in a chain; None for a tree, or if no option reads them."""
    if not chosen.offers.read_confidences or chosen.sizes is not None:
        return None
    return DraftConfidences(
        limits.num_slots,
        chosen.config.drafter.num_draft_tokens,
        built.device,
        threshold=chosen.offers.threshold,
        kernels=built.kernels,
        temperatures=chosen.offers.temperatures,
    )


def build_row_confidences(chosen: Chosen, limits: Limits, built: TargetBuild) -> RowConfidences | None:
    """Make the buffers for the drafter's confidences in a tree; None for a chain, or if no option reads them."""
    if not chosen.offers.read_confidences or chosen.sizes is None:
        return None
    return RowConfidences(limits.num_slots, chosen.sizes.num_rows, built.device, chosen.offers.threshold)


def build_rounds(
    chosen: Chosen,
    parts: Parts,
    resources: DrafterResources,
    recorder: GraphRecorder | None,
    built: TargetBuild,
) -> Rounds:
    """Make the decode rounds of an engine: one, or one for each K that a batch can have.

    A schedule has several K. With a drafter on the host, the number of drafts that the device makes is a K too. If
    requests have a K of their own, there is also a round without drafting.

    `recorder` captures parts of a round as graphs; None captures nothing.
    """
    most, offers = parts.drafter.num_draft_tokens, chosen.offers
    if chosen.sizes is not None:
        tree = TreeParts.of(parts, built.kernels)
        drafts = Tree(parts, tree, chosen.sizes.num_rows, resources.limits.page_size)
        if resources.row_confidences is None:
            return Rounds(DecodeRound(parts, drafts, AllOffered(most)))
        rows = RowOffers(resources.row_confidences, offers.budget)
        return Rounds(DecodeRound(parts, drafts, CountedRows(parts, rows, most, recorder)))
    chain = Chain(parts)
    if not offers.may_be_fewer:
        return Rounds(DecodeRound(parts, chain, AllOffered(most)))
    is_own = offers.by_request != ByRequest.same
    offered = DraftOffers(
        resources.limits.num_slots,
        built.device,
        confidences=resources.confidences,
        budget=offers.budget,
        kernels=built.kernels,
        by_request=is_own,
    )
    choices = (most,) if offers.schedule is None else offers.schedule.choices
    assert choices[0] == most, "the largest K is what slots have room for"
    finder = parts.drafter.requirements.on_host
    if finder is not None and finder.num_on_device not in choices:
        choices = (*choices, finder.num_on_device)
    rounds = {k: DecodeRound(parts, chain, Counted(parts, offered, k, recorder)) for k in choices}
    host = None if finder is None else HostDrafts(finder, parts.slots, offered)
    limits = RequestLimits(_request_k(chosen, most), offered) if is_own else None
    return Rounds(rounds[most], offers.schedule, rounds, host, limits, PlainRound(parts, chain) if is_own else None)


def _request_k(chosen: Chosen, most: int) -> RequestK:
    given, drafter = GivenK(most), chosen.config.drafter
    return given if drafter.by_request == ByRequest.given else RunningK(given, drafter.off_below)


def _rule_build(chosen: Chosen, built: TargetBuild, limits: Limits, seeds: SlotSeeds) -> RuleBuild:
    return RuleBuild(
        limits.num_slots,
        built.markers,
        built.target.eos_token_ids,
        chosen.config.cache.chunk_size,
        built.device,
        built.kernels,
        seeds=seeds,
    )


def build_teacher(config: RunConfig, built: TargetBuild, limits: Limits) -> TeacherForcing:
    """Make the teacher-forcing pass of the target, with a KV cache that holds one text at a time."""
    one_sequence = limits.one_sequence()
    cache = build_cache(built.target.layer_plans, one_sequence, built)
    return TeacherForcing(
        built.target,
        built.backend,
        cache,
        page_size=limits.page_size,
        chunk_size=config.cache.chunk_size,
        invariant_rows=built.invariant_rows,
        rounding=built.prompt_rounding,
    )
