"""This module makes the engine of a configuration."""

from __future__ import annotations

import dataclasses

from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.assembly import registry
from spec_lab.assembly.caches import build_cache
from spec_lab.assembly.drafters.lookup import NoDrafterConfig
from spec_lab.assembly.graphs import EagerGraphConfig
from spec_lab.assembly.graphs_loader import build_graph_mode, build_mover, prompt_pass_maker
from spec_lab.assembly.heads import DrafterFactory, DrafterResources
from spec_lab.assembly.limits import Limits, overlaps
from spec_lab.assembly.models import Models
from spec_lab.assembly.option import CatchupPruningOption, PromptPruningOption
from spec_lab.assembly.rounds_loader import build_confidences, round_maker
from spec_lab.assembly.rules import RejectionConfig, RejectionMethodChoice, StrictAcceptanceConfig
from spec_lab.assembly.rules_loader import RuleResources, build_rule, build_tree_rule
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import PruneConfig, RecurrentConfig, RunConfig, TreeConfig, VerifyConfig
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.engine.engine import Engine
from spec_lab.engine.pages import PageAllocator, PageTable
from spec_lab.engine.round import Parts
from spec_lab.engine.scheduler import Scheduler
from spec_lab.engine.slots import SlotState
from spec_lab.engine.states import slot_states
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.engine.timing import make_timer
from spec_lab.errors import UserError

UNPRUNED = PruneConfig(prefill="all_rows", catchup="none")
PLAIN_PRUNE = PruneConfig(prefill="last_row", catchup="none")


def build_prune_policy(config: RunConfig) -> PrunePolicy:
    """Makes the policy that `prune.prefill` and `prune.catchup` name."""
    registered = registry.of(config)
    prompt = registered.find(PromptPruningOption, config.prune.prefill)
    catchup = registered.find(CatchupPruningOption, config.prune.catchup)
    return PrunePolicy(prompt.make(), catchup.make(), catchup.in_one_call)


def build_engine(config: RunConfig, models: Models, make_drafter: DrafterFactory, limits: Limits) -> Engine:
    """Make an engine with caches of its own."""
    prune = build_prune_policy(config)
    if prune.needs_prewrite and not models.backend.prewrite:
        raise UserError(
            f"attention={config.attention.name} cannot write KV before attention, which prune.prefill=last_row and "
            "prune.catchup=pre_attention need; use prune=none or attention=torch"
        )
    seeds = SlotSeeds(limits.num_slots, config.seed, models.device)
    rule_resources = RuleResources(models, limits, seeds)
    sizes = tree_sizes(config)
    rule = build_rule(config, rule_resources) if sizes is None else build_tree_rule(config, rule_resources)
    num_verified = config.drafter.num_draft_tokens + 1
    limits = dataclasses.replace(limits, num_rows=num_verified, rollback=config.recurrent.rollback)
    cache = build_cache(models.target.layer_plans, limits, models)
    confidences = build_confidences(config, limits, models)
    drafter = make_drafter(DrafterResources(limits, prune, seeds, cache, confidences))
    assert limits.margin >= 2 * drafter.num_draft_tokens
    num_rows = drafter.num_draft_tokens + 1 if sizes is None else sizes.num_rows
    table = PageTable(limits.num_slots, limits.max_seq_len + limits.margin, limits.page_size, models.device)
    parts = Parts(
        target=models.target,
        drafter=drafter,
        rule=rule,
        backend=models.backend,
        mover=build_mover(config, models),
        cache=cache,
        slots=SlotState(limits.num_slots, num_rows - 1, table, slot_states(cache), models.kernels.commit_rows),
        timer=make_timer(models.device),
        experts_read=models.experts_read,
    )
    allocator = PageAllocator(limits.num_pages)
    scheduler = Scheduler(limits.num_slots, allocator, limits.page_size, limits.max_seq_len, limits.margin)
    graph = build_graph_mode(config, models, limits)
    make_round = round_maker(config, limits, confidences, graph.recorder, models)
    return Engine(
        parts,
        prune,
        graph,
        scheduler,
        config.cache.chunk_size,
        config.cache.prefill_tokens,
        overlaps(config),
        make_round,
        prompt_pass_maker(config, models),
    )


def build_teacher(config: RunConfig, models: Models, limits: Limits) -> TeacherForcing:
    """Make the judge of texts, over a cache that holds one of them at a time."""
    one_sequence = limits.one_sequence()
    cache = build_cache(models.target.layer_plans, one_sequence, models)
    sizes = limits.page_size, config.cache.chunk_size, models.invariant_rows
    return TeacherForcing(models.target, models.backend, cache, *sizes)


def plain_config(config: RunConfig) -> RunConfig:
    """Return the same run without drafter and lossy acceptance: what every run is compared with.

    Its prompt pass computes logits for the last row alone, as every serving engine does: no straw man.
    """
    is_greedy = config.sampling.temperature == 0
    rule = StrictAcceptanceConfig() if is_greedy else RejectionConfig(method=RejectionMethodChoice.one_hot)
    return dataclasses.replace(
        config,
        drafter=NoDrafterConfig(),
        acceptance=rule,
        prune=PLAIN_PRUNE,
        tree=TreeConfig(),
        verify=VerifyConfig(),
        recurrent=RecurrentConfig(),
    )


def unpruned_config(config: RunConfig) -> RunConfig:
    """Return the same run without pruning."""
    return dataclasses.replace(config, prune=UNPRUNED)


def eager_config(config: RunConfig) -> RunConfig:
    """Return the same run without a graph."""
    return dataclasses.replace(config, graph=EagerGraphConfig())
