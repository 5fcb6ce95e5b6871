"""Greedy speculative output equals plain decoding and transformers' generate, token for token, in float32.

Where it differs, plain decoding must have been within NEAR_TIE of another token (design: lossless); `test_engine.py`
has the exact form of it on a target without ties. The cases are a table, `lossless_cases.py`. The vocabulary is tiny
and the pairs are taught (`taught_pairs.py`), so that drafts are accepted in part and EOS falls inside blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.config.option import options
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.drafters.oracle import OracleDrafter
from spec_lab.engine.engine import Engine
from spec_lab.options.drafters.blocks import Dflash
from spec_lab.options.trees import DynamicTreeConfig, StaticTreeConfig
from tests import drawn_plan  # noqa: F401  registers a plan
from tests.engine_state import find_tensors, is_cache, poison
from tests.fake_target import PaddedGraph
from tests.graph_lab import MODES
from tests.lab import PRUNING, Reference, make_config, make_engine, random_requests, with_depth_as_k
from tests.lossless_cases import (
    CAPTURED,
    CASES,
    DRAFTERS,
    KNOBS,
    PRODUCT,
    TARGETS,
    TRAINED,
    TREE_DRAFTERS,
    TREES,
    Case,
)
from tests.taught_pairs import TEACHERS, teach_drafters
from tests.tiny_checkpoints import make_tiny_target

VOCAB = 24
EVERY_LENGTH = {0, 1, 2, 3}


def mixed_requests() -> list[Request]:
    """Requests with prompts of 1 token, shorter than K, and longer than chunks and windows; with limits from 1 up; some
    go on past EOS.
    """
    requests = random_requests(7, max_new_tokens=9, vocab_size=VOCAB, lengths=(2, 12), seed=9)
    requests[0] = replace(requests[0], prompt_ids=(7,))
    requests[1] = replace(requests[1], prompt_ids=(9,), ignore_eos=True)
    requests[2] = replace(requests[2], prompt_ids=(9, 4, 9))
    requests[3] = replace(requests[3], max_new_tokens=1)
    requests[4] = replace(requests[4], max_new_tokens=6, ignore_eos=True)
    requests[5] = replace(requests[5], ignore_eos=True)
    return requests


def tokens_of(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


def accepted_in(result: GenerationResult) -> list[list[int]]:
    """How many drafts each request's rounds accepted."""
    return [record.accepted_per_round for record in result.requests]


@dataclass
class Lab:
    """A target, its drafters with weights, the requests, and what plain decoding and transformers make of them."""

    target: Path
    weights: dict[str, Path]
    requests: list[Request]
    reference: Reference
    plain: dict[str, list[int]]
    transformers: dict[str, list[int]]
    results: dict[Case, GenerationResult] = field(default_factory=dict)

    def engine(self, case: Case, cache: dict[str, Any] | None = None, **changes: Any) -> Engine:
        """An engine with NaN in every row that nothing has written; `changes` are top-level keys."""
        pair = self.target, self.weights.get(case.drafter, self.target)
        sizes = {"page_size": case.page_size, "prefill_chunk": case.chunk} | (cache or {})
        of_head = {"path": str(pair[1]), "head_drafts": 1} if case.drafter == "hybrid" else {}
        config = make_config(
            pair,
            case.drafter,
            case.num_draft_tokens,
            case.prune,
            batch_size=case.batch_size,
            cache=sizes,
            options=KNOBS.get(case.drafter, {}) | dict(case.options) | of_head | {"plan": case.plan},
        )
        if case.tree != "none":
            config = with_depth_as_k(replace(config, tree=TREES[case.tree]))
        if case.graph != "eager":
            config = replace(config, graph=MODES[case.graph])
        engine = make_engine(replace(config, **changes), self.requests)
        if case.graph == "eager":
            engine.graph = PaddedGraph(case.padding)
        poison(engine)
        if isinstance(engine.parts.drafter, OracleDrafter):
            engine.parts.drafter.learn(self.plain)
        return engine

    def run(self, case: Case) -> GenerationResult:
        """The result of a case, which tests share."""
        if case not in self.results:
            self.results[case] = self.engine(case).generate(self.requests)
        return self.results[case]

    def check(self, case: Case) -> None:
        result = self.run(case)
        self.reference.assert_lossless(self.requests, tokens_of(result), self.plain)
        if case.graph != "eager":
            assert result.graph.replays > 0


def make_lab(folder: Path, target: str) -> Lab:
    requests, path = mixed_requests(), folder / "target"
    make_tiny_target(path, vocab_size=VOCAB, **TARGETS[target])
    weights = teach_drafters(path, folder)
    reference = Reference(path)
    lab = Lab(path, weights, requests, reference, {}, {r.request_id: reference.greedy(r) for r in requests})
    lab.plain = tokens_of(lab.run(Case(target, "none", num_draft_tokens=0)))
    return lab


class Labs(dict[str, Lab]):
    """A lab for each target, made when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, target: str) -> Lab:
        self[target] = make_lab(self._folder / target, target)
        return self[target]


@pytest.fixture(autouse=True)
def costs_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_lab.engine.measured_costs.SECONDS", 0.0)


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Labs:
    return Labs(tmp_path_factory.mktemp("labs"))


@pytest.mark.parametrize("target", TARGETS)
def test_plain_decoding_equals_transformers_generate(labs: Labs, target: str) -> None:
    lab = labs[target]
    lab.reference.assert_lossless(lab.requests, lab.plain, lab.transformers)
    lengths = [len(lab.plain[request.request_id]) for request in lab.requests]
    limits = [request.max_new_tokens for request in lab.requests]
    assert lengths != limits, "some request stops at EOS"
    stops = lab.engine(Case(target, "none", num_draft_tokens=0)).parts.target.eos_token_ids
    assert any(stops & set(lab.plain[request.request_id][:-1]) for request in lab.requests), "some go on past EOS"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_equals_plain_decoding(labs: Labs, case: Case) -> None:
    labs[case.target].check(case)


@pytest.mark.product
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_output_equals_plain_decoding_in_every_combination(labs: Labs, case: Case) -> None:
    labs[case.target].check(case)


def test_every_drafter_of_the_lab_is_in_the_table() -> None:
    """It is there with weights that are taught to it, if it has some, and under the graph modes, if it can be
    captured.
    """
    drafters = {name: option for name, option in options("drafter").items() if option.__base__ is not Dflash}
    assert set(DRAFTERS) == set(drafters)
    assert set(TEACHERS) == {name for name, option in drafters.items() if hasattr(option, "folder")}
    assert set(CAPTURED) == set(drafters) - {"none"}
    assert {*TREE_DRAFTERS, "ngram"} == {name for name, option in drafters.items() if option.drafts_trees}


@pytest.mark.parametrize(
    ("drafter", "lengths"),
    [
        *((name, EVERY_LENGTH) for name in TRAINED),
        ("ngram", EVERY_LENGTH),
        ("suffix", {0, 1, 2}),
        ("hybrid", {0, 1, 2}),
        ("p_eagle", {0, 1}),
        ("random", {0, 1}),
        ("oracle", {3}),
    ],
)
def test_drafts_are_accepted_in_part(labs: Labs, drafter: str, lengths: set[int]) -> None:
    """Otherwise the table would notice little. The oracle is wrong past the end only. Blocks of what is trained are cut
    by an end of sequence and by limits."""
    accepted: set[int] = set()
    ends: set[str] = set()
    wanted_ends = {"eos", "length"} if drafter in TRAINED else set()
    for target in TARGETS:
        result = labs[target].run(Case(target, drafter, "catchup", batch_size=8))
        for rounds in accepted_in(result):
            accepted |= set(rounds[:-1] if drafter == "oracle" else rounds)
        ends |= {record.finish_reason.value for record in result.requests if record.truncated}
        if accepted >= lengths and ends >= wanted_ends:
            break
    assert accepted >= lengths and ends >= wanted_ends
    assert drafter != "oracle" or accepted == lengths


@pytest.mark.parametrize("drafter", TREE_DRAFTERS)
def test_a_tree_is_accepted_in_part_and_further_than_its_spine(labs: Labs, drafter: str) -> None:
    """Every length occurs, and more drafts are accepted than of a chain of its depth."""
    lab = labs["qwen3"]
    chain, tree = (
        accepted_in(lab.run(Case("qwen3", drafter, batch_size=8, tree=tree))) for tree in ("none", "dynamic")
    )
    third_is_wrong = drafter in ("frozen_kv", "p_eagle")  # here, always
    longest = EVERY_LENGTH - {3} if third_is_wrong else EVERY_LENGTH
    assert {count for rounds in tree for count in rounds} == longest
    assert sum(map(len, tree)) < sum(map(len, chain)), "fewer rounds for the same text"


@pytest.mark.parametrize("drafter", TREE_DRAFTERS)
def test_a_tree_that_is_a_chain_has_the_bits_of_the_chain(labs: Labs, drafter: str) -> None:
    """Output, accepted lengths and every byte of both caches are those of tree=none; of a draft model's own cache the
    numbers are, since torch's attention of its steps may round otherwise (on a Zen 4, not on a Xeon)."""
    lab = labs["qwen2_sliding"]
    case = Case("qwen2_sliding", drafter, "catchup", batch_size=3, page_size=4)
    engines = [lab.engine(case), lab.engine(case, tree=DynamicTreeConfig(topk=1, depth=3, num_rows=4))]
    results = [engine.generate(lab.requests) for engine in engines]
    assert tokens_of(results[0]) == tokens_of(results[1]) and accepted_in(results[0]) == accepted_in(results[1])
    chain, tree = (
        {path: tensor for path, tensor in find_tensors(engine).items() if is_cache(engine, tensor)}
        for engine in engines
    )
    assert chain.keys() == tree.keys()
    for path, tensor in chain.items():
        if drafter == "draft_model" and path.startswith("drafter."):
            torch.testing.assert_close(tree[path], tensor, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert torch.equal(tree[path].view(torch.int32), tensor.view(torch.int32)), path


@pytest.mark.parametrize("drafter", [name for name in TREE_DRAFTERS if name not in ("dflash", "p_eagle")])
def test_a_branch_sees_nothing_of_others(labs: Labs, drafter: str) -> None:
    """What the drafter makes of a branch is the same whatever stands beside it. Of a block: `test_block_trees.py`."""
    lab, alone, beside = labs["qwen2_sliding"], [[1], [1, 0], [1, 0, 0]], [[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 0]]
    requests = [replace(request, max_new_tokens=1) for request in lab.requests]
    found = []
    for paths in (alone, [*alone, *beside]):
        engine = lab.engine(Case("qwen2_sliding", drafter), tree=StaticTreeConfig(paths=paths))
        drafts: Any = engine.parts.drafter
        finish, rows = drafts.finish, []
        drafts.finish = lambda state, finish=finish, rows=rows: (rows.append(state.hidden[0, -1]), finish(state))[1]
        engine.generate(requests)
        found.append(torch.stack(rows))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    assert found[0].std() > 0.01


def test_pruning_changes_no_draft_of_a_block(labs: Labs) -> None:
    """Not only the output is equal: the same drafts are accepted in the same rounds."""
    accepted = [accepted_in(labs["qwen3"].run(Case("qwen3", "dflash", prune, batch_size=8))) for prune in PRUNING]
    assert accepted.count(accepted[0]) == len(PRUNING)


def test_few_pages_change_nothing(labs: Labs) -> None:
    """Admission waits; slots are reused by requests of other lengths."""
    lab = labs["llama"]
    engine = lab.engine(Case("llama", "eagle3", "catchup", batch_size=8, page_size=4), cache={"num_pages": 2 + 20})
    for _ in range(2):
        result = engine.generate(lab.requests)
        lab.reference.assert_lossless(lab.requests, tokens_of(result), lab.plain)
        assert max(len(record.request_ids) for record in result.rounds) < 8
