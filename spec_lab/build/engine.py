"""Builds the engine of a configuration, and its decode rounds.

A round drafts a chain or a tree, or nothing. It verifies all drafts, or only those that each request offers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.attention.stale import StaleMover
from spec_lab.build.caches import build_cache
from spec_lab.build.lab import Lab
from spec_lab.build.limits import Limits
from spec_lab.build.models import Models
from spec_lab.config.choices import DraftMetadata
from spec_lab.config.option import get
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.protocols import Drafter
from spec_lab.engine.drafts import Chain, Tree, TreeBehindRoot
from spec_lab.engine.engine import Engine
from spec_lab.engine.graphs.prompts import CapturedPromptPass
from spec_lab.engine.host_drafts import HostDrafts
from spec_lab.engine.missed_rows import MissedRows
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.offers import Offers
from spec_lab.engine.pages import PageAllocator, PageTable
from spec_lab.engine.parts import Parts
from spec_lab.engine.plain_round import PlainRound
from spec_lab.engine.plan import LaunchShape
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.rounds import Rounds
from spec_lab.engine.scheduler import Scheduler
from spec_lab.engine.slots import SlotState
from spec_lab.engine.states import SlotStates
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.engine.timing import make_timer

MISSED_ROUNDS = 32
"""The rounds that a drafter may miss before it catches up."""

DrafterMaker = Callable[[Lab], Drafter[Any]]


def build_engine(run: Run, models: Models, limits: Limits, make_drafter: DrafterMaker | None = None) -> Engine:
    """Make an engine with its own KV cache, slots and scheduler. The loaded target is shared.

    `make_drafter` makes another drafter than the run's, such as one that reads its checkpoint otherwise.
    """
    sizes = run.sizes
    limits = dataclasses.replace(limits, num_rows=run.drafter.num_draft_tokens + 1, rollback=run.recurrent.rollback)
    if models.backend.latent is not None:
        models.backend.latent.expect(run.batch_size)
    cache = build_cache(models.target.layer_plans, limits, models, run.cache.dtype)
    timer = make_timer(models.device)
    notes = run.record.confidences and run.drafter.notes_confidence and sizes is None
    confidences = DraftConfidences(limits.num_slots, run.drafter.num_draft_tokens, models.device, models.kernels)
    lab = Lab.of(
        models,
        run=run,
        limits=limits,
        seeds=SlotSeeds(limits.num_slots, run.seed, models.device),
        target_cache=cache,
        confidences=confidences if notes else None,
        span=timer.span,
    )
    kept, rule = lab.kept, run.acceptance.build(lab)
    drafter = (make_drafter or run.drafter.build)(lab)
    assert limits.margin >= 2 * drafter.num_draft_tokens
    num_drafts = drafter.num_draft_tokens if sizes is None else sizes.num_rows - 1
    table = PageTable(limits.num_slots, limits.max_seq_len + limits.margin, limits.page_size, models.device)
    is_stale = getattr(run.graph, "metadata", None) == DraftMetadata.stale
    parts = Parts(
        target=models.target,
        drafter=drafter,
        rule=rule,
        backend=models.backend,
        mover=StaleMover(models.backend) if is_stale else models.backend,
        cache=cache,
        slots=SlotState(limits.num_slots, num_drafts, table, SlotStates(cache.recurrent), kernels=models.kernels),
        timer=timer,
        experts_read=models.experts_read,
    )
    scheduler = Scheduler(
        limits.num_slots,
        PageAllocator(limits.num_pages),
        page_size=limits.page_size,
        max_seq_len=limits.max_seq_len,
        margin=limits.margin,
        max_in_flight=run.workload.max_in_flight,
    )
    graph = run.graph.build(lab)
    rounds = build_rounds(lab, parts, graph.recorder is not None)
    of_prompts = (rounds.widest, kept, run.cache.chunk_size, run.cache.prefill_tokens, models.prompt_rounding)
    captures_prompts = getattr(run.graph, "prompts", False)
    if captures_prompts and models.target.config.keeps_states:
        raise UserError("graph.prompts=true captures no prompt of a target that keeps states; use graph.prompts=false")
    prompt_pass = CapturedPromptPass(*of_prompts, lab.recorder()) if captures_prompts else PromptPass(*of_prompts)
    return Engine(rounds, kept, graph, scheduler, prompt_pass=prompt_pass, overlap=run.graph.overlap)


def build_rounds(lab: Lab, parts: Parts, is_captured: bool) -> Rounds:
    """Make the decode rounds of an engine: one, or those that a plan chooses from. `is_captured`: as graphs."""
    sizes, needs, kept = lab.run.sizes, parts.drafter.requirements, lab.confidences
    most, finder, chain = parts.drafter.num_draft_tokens, needs.on_host, Chain(parts)
    plan = get("drafter.plan", lab.run.drafter.plan)().build(lab)
    offered = DraftOffers(lab.limits.num_slots, most, lab.device, lab.kernels)
    counts = None if plan is None and finder is None else offered
    missed = None
    if plan is not None and plan.resumes:
        num_states = len(needs.features.layer_inputs) + (needs.features.final_hidden is not None)
        # A module for each draft runs over its own window, which is that of a round.
        size = most + 1 if needs.distinct_steps else max(most + 1, MISSED_ROUNDS)
        width = num_states * lab.target.config.hidden_size
        missed = MissedRows(lab.limits.num_slots, size, width, lab.dtype, device=lab.device)
    tree = None
    if sizes is not None:
        tree = Tree(parts, sizes.num_rows, lab.limits.page_size, lab.kernels, keeps_path=plan is not None)
    root = chain if tree is None else TreeBehindRoot(parts, tree)

    def make(shape: LaunchShape) -> DecodeRound:
        if plan is not None and finder is None and shape.num_offered == 0:
            num_made = most if tree is not None and shape.num_made else shape.num_made
            return PlainRound(parts, root, offered, missed, num_made=num_made, confidences=kept)
        if tree is not None:
            return DecodeRound(parts, tree.of_first(shape.num_offered + 1), Offers(most, most))
        return DecodeRound(parts, chain, Offers(shape.num_offered, shape.num_made, counts, kept, is_full=shape.is_full))

    num_drafts = most if sizes is None else sizes.num_rows - 1
    return Rounds(
        make,
        LaunchShape(num_drafts, num_drafts if finder is None else finder.num_on_device),
        plan,
        missed,
        offered=offered if tree is None else None,
        host=None if finder is None else HostDrafts(finder, parts.slots, offered),
        makes_all=needs.distinct_steps or tree is not None,
        is_captured=is_captured,
    )


def build_teacher(run: Run, models: Models, limits: Limits) -> TeacherForcing:
    """Make the teacher-forcing pass of the target, with a KV cache that holds one text at a time."""
    return TeacherForcing(
        models.target,
        models.backend,
        build_cache(models.target.layer_plans, limits.one_sequence(), models, run.cache.dtype),
        page_size=limits.page_size,
        chunk_size=run.cache.chunk_size,
        invariant_rows=models.invariant_rows,
        rounding=models.prompt_rounding,
    )
