"""The options of this lab, registered as an extension registers its own."""

from __future__ import annotations

from spec_lab.menu.registry import Registry
from spec_lab.options import loggers, pruning, targets, workloads
from spec_lab.options.attention import torch, triton
from spec_lab.options.drafters import (
    blocks,
    draft_model,
    eagle3,
    frozen_kv,
    hybrid,
    mtp_eagle,
    mtp_vanilla,
    ngram,
    none,
    oracle,
    p_eagle,
    random,
    suffix,
)
from spec_lab.options.graphs import eager, full_loop, round, split_seed, step_replay
from spec_lab.options.rules import (
    cascade,
    ensemble,
    fly,
    fuzzy,
    mentored,
    rejection,
    relaxed_thinking,
    strict,
    synthetic,
    threshold,
    typical,
)
from spec_lab.options.trees import dynamic, static
from spec_lab.options.trees import none as chain

HEADS = (eagle3, mtp_eagle, mtp_vanilla, frozen_kv, draft_model, p_eagle)
DRAFTERS = (none, ngram, suffix, oracle, random, *HEADS, hybrid)
LOSSY_RULES = (typical, threshold, cascade, ensemble, mentored, fuzzy, fly)
RULES = (strict, relaxed_thinking, rejection, synthetic, *LOSSY_RULES)
GRAPHS = (eager, split_seed, step_replay, full_loop, round)
ATTENTION = (torch, triton)
TREES = (chain, dynamic, static)


def register(registry: Registry) -> None:
    """Add the rows, in the order in which refusals name them."""
    registry.add(*targets.ROWS)
    registry.add(*(option.ROW for option in (*DRAFTERS, *RULES, *GRAPHS, *ATTENTION, *TREES)))
    registry.add(*blocks.ROWS, *pruning.ROWS, *workloads.ROWS, *workloads.CHECKERS, *loggers.ROWS)
