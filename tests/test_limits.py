"""The sizes of an engine's caches, against the lines of the index contract that say what is reserved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose
from spec_lab.build.limits import Limits, engine_limits
from spec_lab.build.models import load_models
from spec_lab.config.checks import admit
from spec_lab.config.groups import GraphConfig, TreeConfig
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.types import Request
from spec_lab.options.graphs import EagerGraph, RoundGraph
from spec_lab.options.trees import DynamicTreeConfig, StaticTreeConfig
from tests.lab import make_config
from tests.tiny_checkpoints import TINY_SIZES

REQUESTS = [Request("short", "x", (7,) * 5, 9), Request("long", "x", (7,) * 21, 9)]
K, N = 3, 4


def limits(folder: Path, **changes: Any) -> Limits:
    """The sizes for `REQUESTS` of a tiny target, of which config.json is all that is read."""
    (folder / "config.json").write_text(json.dumps(TINY_SIZES | {"model_type": "qwen2"}))
    config = make_config((folder, folder), num_draft_tokens=K, cache={"page_size": 4}, **changes)
    return engine_limits(config, REQUESTS)


@pytest.mark.parametrize(
    ("graph", "num_late_rows"),
    [
        (EagerGraph(), 0),
        (RoundGraph(overlap=True), N),
        (RoundGraph(rounds_per_replay=4), 0),
        (RoundGraph(overlap=True, rounds_per_replay=4), 0),
    ],
)
def test_slots_are_reserved_to_l_plus_2k_and_n_more_where_the_host_runs_a_round_behind(
    graph: GraphConfig, num_late_rows: int, tmp_path: Path
) -> None:
    """Several rounds in a replay ask for no position more: the device ends requests where the host will."""
    found = limits(tmp_path, graph=graph, batch_size=2)
    assert (found.max_seq_len, found.margin) == (30, 2 * K + num_late_rows)
    assert found.max_kv_len == 30 + num_late_rows
    assert found.num_pages == 2 * -(-(30 + found.margin) // 4) + NUM_RESERVED_PAGES


@pytest.mark.parametrize(
    ("tree", "margin"),
    [
        (DynamicTreeConfig(topk=4, depth=3, num_rows=9), K + (K - 1) * 4),
        (DynamicTreeConfig(topk=4, depth=3, num_rows=21), 21),
        (StaticTreeConfig(paths=[[0], [0, 0], [0, 0, 0]]), 2 * K),
    ],
)
def test_a_tree_reserves_the_rows_of_verify_or_of_its_widest_steps(
    tree: TreeConfig, margin: int, tmp_path: Path
) -> None:
    """They are L + max(2K, N, K + (K - 1) * W), where W is the number of rows of the widest draft step."""
    assert limits(tmp_path, tree=tree).margin == margin


def test_the_caches_of_one_sequence_hold_the_longest(tmp_path: Path) -> None:
    one = limits(tmp_path, batch_size=2).one_sequence()
    assert (one.num_slots, one.max_seq_len, one.num_pages) == (1, 30, 9 + NUM_RESERVED_PAGES)


@pytest.mark.parametrize(
    ("words", "behind"),
    [
        (["drafter=none"], 129),
        (["tree=dynamic", "tree.topk=16", "drafter.num_draft_tokens=16", "tree.num_rows=64"], 16 + 15 * 16),
    ],
)
def test_rotary_tables_reach_as_far_behind_a_sequence_as_a_tree(words: list[str], behind: int) -> None:
    chosen = admit(compose([*words, "kernels=torch", "attention=torch", "device=cpu"]).config)
    assert load_models(chosen, 40).target.num_positions == 40 + behind
