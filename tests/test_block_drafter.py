"""Block drafters against their papers written down slowly, without any cache (`slow_block.py`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.types import Request
from spec_lab.menu.config import GraphConfig
from spec_lab.options.graphs.eager import EagerGraphConfig
from spec_lab.options.graphs.full_loop import FullLoopGraphConfig
from spec_lab.options.graphs.round import RoundGraphConfig
from spec_lab.options.graphs.split_seed import SplitSeedGraphConfig
from spec_lab.options.rules.synthetic import SyntheticConfig
from tests.engine_state import poison
from tests.fake_target import PaddedGraph
from tests.lab import Reference, make_config, make_engine, random_requests
from tests.scripted_rule import ScriptedRule, install
from tests.slow_block import SlowBlock
from tests.tiny_blocks import TinyBlock, write_block
from tests.tiny_checkpoints import make_tiny_target

BLOCKS: dict[str, TinyBlock] = {
    "dflash": TinyBlock(),
    "anchor_first": TinyBlock(anchor_first=True),
    "markov": TinyBlock(head="markov", anchor_first=True),
    "gated": TinyBlock(head="markov", form="gated"),
    "rnn": TinyBlock(head="markov", form="rnn", anchor_first=True),
    "gru": TinyBlock(head="gru"),
    "gru_shifted": TinyBlock(head="gru", shift_label=True),
    "selector": TinyBlock(head="selector", conv=True),
    "lattice": TinyBlock(head="lattice"),
    "lattice_conv": TinyBlock(head="lattice", conv=True, num_layers=1, outputs=(4,)),
    "window": TinyBlock(window=3),
    "causal_window": TinyBlock(window=3, non_causal=False, sliding=(1,)),
    "embedding_tap": TinyBlock(outputs=(-1, 3, 6)),
    "deepspec": TinyBlock(layout="deepspec", head="markov", anchor_first=True),
    "speculators": TinyBlock(layout="speculators"),
    "speculators_dspark": TinyBlock(layout="speculators", head="markov", anchor_first=True, draft_vocab_size=100),
    "speculators_dflash2": TinyBlock(layout="speculators", head="selector", conv=True, window=5),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("target")
    make_tiny_target(folder, "qwen3")
    return folder, Reference(folder)


def run_against_slow_block(
    target: tuple[Path, Reference], folder: Path, block: TinyBlock, num_drafts: int = 3, prune: str = "none"
) -> ScriptedRule:
    """Prompts of one token and of several chunks, page borders, padded rows, slots that are used again."""
    tensors = write_block(folder, block, read_model_config(target[0]))
    requests = [
        Request(r.request_id, r.category, r.prompt_ids, 14, ignore_eos=True)
        for r in random_requests(4, lengths=(1, 12), seed=2)
    ]
    requests[0] = Request("one", "x", (17,), 14, ignore_eos=True)
    config = make_config(
        (target[0], folder),
        "dflash",
        num_drafts,
        prune,
        batch_size=3,
        cache={"page_size": 4, "prefill_chunk": 5},
        options=block.options,
    )
    engine = make_engine(config, requests)
    rule = install(engine, SlowBlock(tensors, block, target[1]))
    engine.graph = PaddedGraph(4)
    poison(engine)
    engine.generate(requests)
    return rule


@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_equal_the_block_recomputed(target: tuple[Path, Reference], tmp_path: Path, name: str) -> None:
    """Every slot's law is compared, after prompts and after rounds of every n."""
    rule = run_against_slow_block(target, tmp_path, BLOCKS[name])
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 40


@pytest.mark.parametrize("num_drafts", [1, 6])
def test_fewer_drafts_are_verified_of_the_same_block(
    target: tuple[Path, Reference], tmp_path: Path, num_drafts: int
) -> None:
    rule = run_against_slow_block(target, tmp_path, BLOCKS["markov"], num_drafts)
    assert set(rule.accepted) == set(range(num_drafts + 1))


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("gru", FullLoopGraphConfig()),
        ("rnn", SplitSeedGraphConfig()),
        ("lattice_conv", RoundGraphConfig(prompts=True)),
        ("speculators_dspark", RoundGraphConfig(rounds_per_replay=3)),
        ("window", RoundGraphConfig(overlap=True)),
    ],
)
def test_captured_rounds_are_eager_ones(
    target: tuple[Path, Reference], tmp_path: Path, name: str, graph: GraphConfig
) -> None:
    """Drafts are accepted as a rule imposes it, so that each of them shows in the text."""
    write_block(tmp_path, BLOCKS[name], read_model_config(target[0]))
    requests = random_requests(4, 12, lengths=(1, 12), seed=2)
    results = []
    for mode in (EagerGraphConfig(), graph):
        changes = {"batch_size": 3, "cache": {"page_size": 4}, "options": BLOCKS[name].options, "graph": mode}
        config = make_config((target[0], tmp_path), "dflash", **changes)
        imposed = SyntheticConfig(mean_length=None, rates=[0.8, 0.5, 0.3])
        engine = make_engine(replace(config, acceptance=imposed), requests)
        results.append([(r.output_ids, r.accepted_per_round) for r in engine.generate(requests).requests])
    assert results[0] == results[1]
