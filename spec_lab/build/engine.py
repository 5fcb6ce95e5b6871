"""Builds the engine of a configuration, and its decode rounds.

A round drafts a chain or a tree, or nothing. It verifies all drafts, or only those that each request offers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from spec_lab.acceptance.confidences import DraftConfidences, RowConfidences
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.build.caches import build_cache
from spec_lab.build.graphs import build_mover, prompt_pass_maker
from spec_lab.build.lab import Lab
from spec_lab.build.limits import Limits, overlaps
from spec_lab.build.models import Models
from spec_lab.config.choices import ByRequest
from spec_lab.config.option import get
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.kept import AllPromptRows, PrunePolicy
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.protocols import Drafter
from spec_lab.core.pruning import Drop
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

DrafterMaker = Callable[[Lab], Drafter[Any]]


def prune_policy(run: Run, backend: AttentionBackend) -> PrunePolicy:
    """Make the pruning policy from `prune.prefill` and `prune.catchup`, as far as a backend can do it.

    One that writes KV with attention prunes no prompts, but it may drop rows of the catch-up step after attention.

    Raises:
        UserError: `prune.catchup` drops rows before attention.
    """
    prompt, catchup = get("prune.prefill", run.prune.prefill)().build(), get("prune.catchup", run.prune.catchup)().drop
    drops = (catchup(size) for size in range(1, run.batch_size + 1))
    if not backend.prewrite and any(drop is Drop.BEFORE_ATTENTION for drop in drops):
        raise UserError(
            f"attention={run.attention.name} cannot write KV before attention, which prune.catchup="
            f"{run.prune.catchup} needs; use prune=post_attention or attention=torch"
        )
    prunes_prompts = backend.prewrite or not prompt.needs_prewrite
    return PrunePolicy(prompt if prunes_prompts else AllPromptRows(), catchup)


def build_engine(run: Run, models: Models, limits: Limits, make_drafter: DrafterMaker | None = None) -> Engine:
    """Make an engine with its own KV cache, slots and scheduler. The loaded target is shared.

    `make_drafter` makes another drafter than the run's, such as one that reads its checkpoint otherwise.
    """
    sizes, offers, kept = run.sizes, run.offers, prune_policy(run, models.backend)
    seeds = SlotSeeds(limits.num_slots, run.seed, models.device)
    limits = dataclasses.replace(limits, num_rows=run.drafter.num_draft_tokens + 1, rollback=run.recurrent.rollback)
    cache = build_cache(models.target.layer_plans, limits, models)
    timer = make_timer(models.device)
    confidences, rows = None, None
    if offers.read_confidences and sizes is not None:
        rows = RowConfidences(limits.num_slots, sizes.num_rows, models.device, offers.threshold)
    elif offers.read_confidences:
        confidences = DraftConfidences(
            limits.num_slots,
            run.drafter.num_draft_tokens,
            models.device,
            threshold=offers.threshold,
            kernels=models.kernels,
            temperatures=offers.temperatures,
        )
    lab = Lab(
        run,
        models,
        limits=limits,
        kept=kept,
        seeds=seeds,
        target_cache=cache,
        confidences=confidences,
        row_confidences=rows,
        span=timer.span,
    )
    rule = run.acceptance.build(lab)
    drafter = (make_drafter or run.drafter.build)(lab)
    assert limits.margin >= 2 * drafter.num_draft_tokens
    num_rows = drafter.num_draft_tokens + 1 if sizes is None else sizes.num_rows
    table = PageTable(limits.num_slots, limits.max_seq_len + limits.margin, limits.page_size, models.device)
    parts = Parts(
        target=models.target,
        drafter=drafter,
        rule=rule,
        backend=models.backend,
        mover=build_mover(run, models),
        cache=cache,
        slots=SlotState(limits.num_slots, num_rows - 1, table=table, states=slot_states(cache), kernels=models.kernels),
        timer=timer,
        experts_read=models.experts_read,
    )
    allocator = PageAllocator(limits.num_pages)
    scheduler = Scheduler(
        limits.num_slots,
        allocator,
        page_size=limits.page_size,
        max_seq_len=limits.max_seq_len,
        margin=limits.margin,
        max_in_flight=run.workload.max_in_flight,
    )
    graph = run.graph.build(lab)
    return Engine(
        build_rounds(lab, parts, graph.recorder),
        kept,
        graph=graph,
        scheduler=scheduler,
        prefill_chunk=run.cache.chunk_size,
        prefill_tokens=run.cache.prefill_tokens,
        overlap=overlaps(run),
        make_prompt_pass=prompt_pass_maker(run, models),
    )


def build_rounds(lab: Lab, parts: Parts, recorder: GraphRecorder | None) -> Rounds:
    """Make the decode rounds of an engine: one, or one for each K that a batch can have.

    A schedule has several K. With a drafter on the host, the number of drafts that the device makes is a K too. If
    requests have a K of their own, there is also a round without drafting.

    `recorder` captures parts of a round as graphs; None captures nothing.
    """
    run, models, limits = lab.run, lab.models, lab.limits
    most, offers = parts.drafter.num_draft_tokens, run.offers
    if run.sizes is not None:
        tree = TreeParts.of(parts, models.kernels)
        drafts = Tree(parts, tree, run.sizes.num_rows, limits.page_size)
        if lab.row_confidences is None:
            return Rounds(DecodeRound(parts, drafts, AllOffered(most)))
        rows = RowOffers(lab.row_confidences, offers.budget)
        return Rounds(DecodeRound(parts, drafts, CountedRows(parts, rows, most, recorder)))
    chain = Chain(parts)
    if not offers.may_be_fewer:
        return Rounds(DecodeRound(parts, chain, AllOffered(most)))
    is_own = offers.by_request != ByRequest.same
    offered = DraftOffers(
        limits.num_slots,
        models.device,
        confidences=lab.confidences,
        budget=offers.budget,
        kernels=models.kernels,
        by_request=is_own,
    )
    choices = (most,) if offers.schedule is None else offers.schedule.choices
    assert choices[0] == most, "the largest K is what slots have room for"
    finder = parts.drafter.requirements.on_host
    if finder is not None and finder.num_on_device not in choices:
        choices = (*choices, finder.num_on_device)
    rounds = {k: DecodeRound(parts, chain, Counted(parts, offered, k, recorder)) for k in choices}
    host = None if finder is None else HostDrafts(finder, parts.slots, offered)
    given, runs = GivenK(most), offers.by_request == ByRequest.acceptance
    request_k: RequestK = RunningK(given, run.drafter.off_below) if runs else given
    return Rounds(
        rounds[most],
        offers.schedule,
        narrower=rounds,
        host=host,
        limits=RequestLimits(request_k, offered) if is_own else None,
        plain=PlainRound(parts, chain) if is_own else None,
    )


def build_teacher(run: Run, models: Models, limits: Limits) -> TeacherForcing:
    """Make the teacher-forcing pass of the target, with a KV cache that holds one text at a time."""
    one_sequence = limits.one_sequence()
    cache = build_cache(models.target.layer_plans, one_sequence, models)
    return TeacherForcing(
        models.target,
        models.backend,
        cache,
        page_size=limits.page_size,
        chunk_size=run.cache.chunk_size,
        invariant_rows=models.invariant_rows,
        rounding=models.prompt_rounding,
    )
