"""Tiny Gemma 4 targets of every kind with their assistants, through the whole engine: text, drafts and graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.groups import GraphConfig
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.options.trees import DynamicTreeConfig
from tests.covering import each_value
from tests.graph_lab import MODES, synthetic
from tests.lab import Reference, generate, make_config, make_engine, part, random_requests
from tests.scripted_rule import ScriptedRule, install
from tests.tiny_checkpoints import make_tiny_eagle3
from tests.tiny_gemma4 import KINDS, VOCAB, WINDOW, assistants_build, make_tiny_gemma4, make_tiny_gemma4_assistant

pytest.importorskip("transformers.models.gemma4_assistant")

K, PAGE = 3, 4
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
OTHER_TEXTS = {
    "heads of one size": ("e2b", {"global_head_dim": 16}),
    "a rope over all channels": ("e4b", {"rope_parameters": ROPES}),
}
"""Kinds whose targets and assistants have other keys too."""


@dataclass(frozen=True)
class Pair:
    """A target and an assistant for it, as folders and as transformers models."""

    folders: tuple[Path, Path]
    target: Any
    assistant: Any


@pytest.fixture(scope="module", autouse=True)
def transformers_is_mended() -> Iterator[None]:
    with assistants_build():
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Makes the pair of a kind, once; the smaller kinds have assistants whose heads score clusters, as released."""

    @cache
    def make(name: str) -> Pair:
        kind, text = OTHER_TEXTS.get(name, (name, {}))
        folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("assistant")
        target = make_tiny_gemma4(folders[0], kind, **text)
        head = CENTROIDS if kind.startswith("e") else {}
        return Pair(folders, target, make_tiny_gemma4_assistant(folders[1], kind, text=text, **head))

    return make


def requests_past_the_window(count: int = 3, max_new_tokens: int = 18) -> list[Request]:
    """Prompts of one token and of several chunks; all texts end past the window, most past twice of it."""
    requests = random_requests(count, max_new_tokens, vocab_size=VOCAB, lengths=(WINDOW - 2, 4 * WINDOW))
    return [replace(requests[0], prompt_ids=(17,)), *requests[1:]]


@dataclass
class AssistedGeneration:
    """transformers' own drafting behind a fresh forward of the text, in which no rejected row is left."""

    pair: Pair

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        from transformers import GenerationConfig
        from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

        token_ids = torch.tensor([text])
        output = self.pair.target(
            token_ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=True
        )
        assistant = self.pair.assistant
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        generator = SinglePositionMultiTokenCandidateGenerator(
            input_ids=token_ids,
            assistant_model=assistant,
            target_model_input_embeddings=self.pair.target.get_input_embeddings(),
            generation_config=GenerationConfig(max_length=512),
            model_kwargs={},
        )
        ids, logits = generator.get_candidates(
            token_ids, model_kwargs={}, model_outputs=output, is_first_iteration=False, n_last_matches=0
        )
        drafts: list[int] = ids[0, len(text) :].tolist()
        if assistant.masked_embedding is None:
            return drafts, list(logits[0])
        # What was not scored has one and the same number there, under every score.
        return drafts, [row.masked_fill(row == row.min(), float("-inf")) for row in logits[0]]


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_TEXTS])
def test_drafts_of_every_round_equal_those_of_assisted_generation(pairs: Callable[[str], Pair], kind: str) -> None:
    """After prompts of several chunks, and after rounds that accept any number of drafts."""
    pair = pairs(kind)
    requests = [replace(request, ignore_eos=True) for request in requests_past_the_window(3, 12)]
    config = make_config(
        pair.folders,
        "frozen_kv",
        K,
        "prefill",
        batch_size=2,
        cache={"page_size": PAGE, "prefill_chunk": 7},
        options={"position": "bonus"},
    )
    engine = make_engine(config, requests)
    rule: ScriptedRule = install(engine, AssistedGeneration(pair))
    engine.generate(requests)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 30


def spoiled(tokens: list[int]) -> list[int]:
    """A continuation of which about every third token is another."""
    generator = random.Random(3)
    return [(token + 1) % VOCAB if generator.random() < 0.3 else token for token in tokens]


@pytest.mark.parametrize(("kind", "batch_size"), each_value(KINDS, [1, 3]))
def test_the_text_is_that_of_transformers(pairs: Callable[[str], Pair], kind: str, batch_size: int) -> None:
    """Greedy text, with drafts of which most are right, rejected across the window."""
    pair = pairs(kind)
    reference, requests = Reference(pair.folders[0]), requests_past_the_window()
    plain = {request.request_id: reference.greedy(request) for request in requests}
    cache = {"page_size": PAGE, "prefill_chunk": 7}
    engine = make_engine(make_config(pair.folders, "oracle", K, batch_size=batch_size, cache=cache), requests)
    drafter: Any = engine.parts.drafter
    drafter.learn({name: spoiled(tokens) for name, tokens in plain.items()})
    records = engine.generate(requests).requests
    reference.assert_lossless(requests, {record.request_id: record.output_ids for record in records}, plain)
    assert {count for record in records for count in record.accepted_per_round} == {0, 1, 2, 3}


def committed(engine: Engine) -> list[torch.Tensor]:
    """The target's caches without their scratch pages."""
    return [tensor[:, NUM_RESERVED_PAGES * PAGE :] for tensor in engine.parts.cache.tensors]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("e2b", "step_replay"), ("e4b", "full_loop"), ("26b", "overlap")],  # others: test_graph_modes.py
)
def test_a_replay_equals_an_eager_round(pairs: Callable[[str], Pair], kind: str, mode: str) -> None:
    """Tokens, accepted lengths and every byte of KV, by the recorder of the CPU."""
    pair, requests = pairs(kind), requests_past_the_window(3, 10)
    rule = synthetic(K)

    def run(graph: GraphConfig | None) -> tuple[Any, list[torch.Tensor]]:
        config = make_config(pair.folders, "frozen_kv", K, "prefill", batch_size=2, cache={"page_size": PAGE})
        config = replace(config, acceptance=rule.acceptance, **({} if graph is None else {"graph": graph}))
        engine = make_engine(config, requests)
        result = engine.generate(requests)
        assert (result.graph.replays > 0) is (graph is not None)
        outcome = [(record.output_ids, record.accepted_per_round) for record in result.requests]
        return outcome, committed(engine)

    expected, expected_kv = run(None)
    got, kv = run(MODES[mode])
    assert got == expected
    if mode != "overlap":  # surplus rounds write on
        for ours, theirs in zip(kv, expected_kv, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "drafter", "expected"),
    [
        ("e2b", "frozen_kv", {"none": 50, "prefill": 3}),
        ("e2b", "eagle3", {"none": 50, "prefill": 50}),
        ("31b", "frozen_kv", {"none": 0, "prefill": 0}),
    ],
)
def test_prompt_rows_in_layers_that_share_kv_are_counted(
    pairs: Callable[[str], Pair], tmp_path: Path, kind: str, drafter: str, expected: dict[str, int]
) -> None:
    """Of three prompts of 50 rows only the last one of each enters, unless a drafter taps these layers; the text and
    the drafts stay what they were."""
    target, assistant = pairs(kind).folders
    make_tiny_eagle3(tmp_path, read_model_config(target))
    requests = [
        replace(request, prompt_ids=tuple(range(3, 3 + n)))
        for request, n in zip(requests_past_the_window(3, 6), (1, 19, 30), strict=True)
    ]
    results = {}
    for prune in expected:
        pair = (target, tmp_path if drafter == "eagle3" else assistant)
        config = make_config(pair, drafter, K, prune, cache={"page_size": PAGE, "prefill_chunk": 7})
        results[prune] = make_engine(config, requests).generate(requests)
    counted = {prune: sum(p.rows.prefill_shared for p in result.prefills) for prune, result in results.items()}
    assert counted == expected
    texts = [[(r.output_ids, r.accepted_per_round) for r in result.requests] for result in results.values()]
    assert texts[0] == texts[1]


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a tree of the assistant's": ("e2b", "frozen_kv", {"tree": DynamicTreeConfig(topk=3, depth=3, num_rows=9)}),
    "a Gemma as draft model": ("26b", "draft_model", {"prune": "catchup"}),
    "its tree": ("e2b", "draft_model", {"tree": DynamicTreeConfig(topk=2, depth=3, num_rows=7)}),
    "taps behind the last write": ("e2b", "eagle3", {"prune": "catchup"}),
    "paged kernels": ("e2b", "frozen_kv", {"attention": "triton", "kernels": "triton"}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_parts_run_on_gemma(pairs: Callable[[str], Pair], tmp_path: Path, case: str) -> None:
    """Trees, draft models of the family, heads and kernels give transformers' greedy text."""
    kind, drafter, changes = OTHERS[case]
    pair, requests = pairs(kind), requests_past_the_window(3, 10)
    if "kernels" in changes:  # interpreted they take a second a round
        requests = [replace(requests[1], prompt_ids=tuple(range(3, 14)), max_new_tokens=3)]
    make_tiny_eagle3(tmp_path, read_model_config(pairs("e2b").folders[0]))
    weights = {"frozen_kv": pair.folders[1], "draft_model": pairs("e2b").folders[0], "eagle3": tmp_path}
    options = {"prune": "prefill"} | changes
    attention = part("attention", options.pop("attention", "torch"))
    config = make_config(
        (pair.folders[0], weights[drafter]), drafter, K, batch_size=2, cache={"page_size": PAGE}, **options
    )
    reference = Reference(pair.folders[0])
    plain = {request.request_id: reference.greedy(request) for request in requests}
    outputs = generate(replace(config, attention=attention), requests)
    reference.assert_lossless(requests, outputs, plain)
