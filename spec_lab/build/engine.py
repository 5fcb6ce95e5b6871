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
from spec_lab.build.limits import Limits, overlaps
from spec_lab.build.models import Models
from spec_lab.config.choices import DraftMetadata
from spec_lab.config.option import get
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.kept import AllPromptRows, PrunePolicy
from spec_lab.core.layer_protocols import AttentionBackend, MetadataMover
from spec_lab.core.protocols import Drafter
from spec_lab.core.pruning import Drop
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
    sizes, kept = run.sizes, prune_policy(run, models.backend)
    seeds = SlotSeeds(limits.num_slots, run.seed, models.device)
    limits = dataclasses.replace(limits, num_rows=run.drafter.num_draft_tokens + 1, rollback=run.recurrent.rollback)
    cache = build_cache(models.target.layer_plans, limits, models, run.cache.dtype)
    timer = make_timer(models.device)
    notes = run.record.confidences and run.drafter.notes_confidence and run.sizes is None
    confidences = DraftConfidences(limits.num_slots, run.drafter.num_draft_tokens, models.device, models.kernels)
    lab = Lab(
        run,
        models,
        limits=limits,
        kept=kept,
        seeds=seeds,
        target_cache=cache,
        confidences=confidences if notes else None,
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
        mover=_mover(run, models.backend),
        cache=cache,
        slots=SlotState(limits.num_slots, num_rows - 1, table, SlotStates(cache.recurrent), models.kernels),
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
    return Engine(rounds, kept, graph, scheduler, prompt_pass, overlap=overlaps(run))


def _mover(run: Run, backend: AttentionBackend) -> MetadataMover:
    """Return what advances metadata between draft steps: the backend, or a wrong one with graph.metadata=stale.

    Raises:
        UserError: the mode advances attention metadata inside a graph, which the attention backend cannot do.
    """
    metadata = getattr(run.graph, "metadata", None)
    if metadata is not None and not backend.supports_in_place_update:
        raise UserError(
            f"attention={run.attention.name} cannot move its metadata inside a graph, which graph={run.graph.name} "
            "does; use graph=step_replay, which builds it again, or attention=torch"
        )
    return StaleMover(backend) if metadata == DraftMetadata.stale else backend


def build_rounds(lab: Lab, parts: Parts, is_captured: bool) -> Rounds:
    """Make the decode rounds of an engine: one, or those that a plan chooses from. `is_captured`: as graphs."""
    run, models, drafter = lab.run, lab.models, parts.drafter
    needs, most, num_slots = drafter.requirements, drafter.num_draft_tokens, lab.limits.num_slots
    plan = get("drafter.plan", run.drafter.plan)().build(lab)
    chain, kept, finder = Chain(parts), lab.confidences, needs.on_host
    if plan is None and run.sizes is None and finder is None:
        return Rounds(
            lambda _: DecodeRound(parts, chain, Offers(most, most, confidences=kept)), LaunchShape(most, most)
        )
    offered = DraftOffers(num_slots, most, models.device, models.kernels)
    missed = None if plan is None or not plan.resumes else _missed_rows(lab, parts)
    if run.sizes is not None:
        num_rows = run.sizes.num_rows
        tree = Tree(parts, num_rows, lab.limits.page_size, models.kernels, keeps_path=plan is not None)
        root = TreeBehindRoot(parts, tree)

        def make_of_tree(shape: LaunchShape) -> DecodeRound:
            if shape.num_offered:
                return DecodeRound(parts, tree.of_first(shape.num_offered + 1), Offers(most, most))
            return PlainRound(parts, root, offered, missed, most if shape.num_made else 0)

        shape = LaunchShape(num_rows - 1, num_rows - 1)
        return Rounds(make_of_tree, shape, plan, missed, makes_all=True, is_captured=is_captured)

    def make(shape: LaunchShape) -> DecodeRound:
        if shape.num_offered == 0 and finder is None:
            return PlainRound(parts, chain, offered, missed, shape.num_made, kept)
        offers = Offers(shape.num_offered, shape.num_made, offered, kept, shape.is_full)
        return DecodeRound(parts, chain, offers)

    return Rounds(
        make,
        LaunchShape(most, most if finder is None else finder.num_on_device),
        plan,
        missed,
        offered,
        host=None if finder is None else HostDrafts(finder, parts.slots, offered),
        makes_all=needs.distinct_steps,
        is_captured=is_captured,
    )


def _missed_rows(lab: Lab, parts: Parts) -> MissedRows:
    needs, target = parts.drafter.requirements, lab.target
    num_states = len(needs.features.layer_inputs) + (needs.features.final_hidden is not None)
    # A module for each draft runs over its own window, which is that of a round.
    least = parts.drafter.num_draft_tokens + 1
    size = least if needs.distinct_steps else max(least, MISSED_ROUNDS)
    return MissedRows(lab.limits.num_slots, size, num_states * target.config.hidden_size, lab.dtype, lab.device)


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
