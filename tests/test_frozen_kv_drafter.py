"""The frozen-KV drafter in the engine, against a model that recomputes everything from the token list."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.kv_cache import NULL_PAGE
from spec_lab.core.types import Request
from spec_lab.drafters.frozen_kv import FrozenKVDrafter
from spec_lab.engine.engine import Engine
from tests.fake_target import PaddedGraph
from tests.lab import PRUNING, Reference, make_config, make_engine, random_requests
from tests.scripted_rule import ScriptedRule, install
from tests.tiny_assistant import FULL, SLIDING, SlowAssistant, make_tiny_assistant
from tests.tiny_checkpoints import Family, make_tiny_target

PAGE = 4
TARGETS: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 5}),
}
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}


@dataclass(frozen=True)
class Case:
    """A target, an assistant for it, and which layers the assistant must read with which windows."""

    target: str
    sources: tuple[int, ...]
    windows: tuple[int | None, ...]
    position: str = "last"
    assistant: dict[str, Any] = field(default_factory=dict)


CASES = {
    "last_full_layer": Case("qwen3", (7, 7), (None, None)),
    "bonus_position": Case("qwen3", (7, 7), (None, None), "bonus"),
    "named_layers": Case("qwen3", (6, 1), (None, None), assistant={"kv_source_layers": [6, 1]}),
    "other_groups": Case("llama_mha", (7, 7), (None, None), assistant={"num_heads": 8}),
    "centroids": Case("qwen3", (7, 7), (None, None), assistant=CENTROIDS),
    "sliding": Case("qwen2_sliding", (7, 4), (5, None), assistant={"layer_types": (SLIDING, FULL)}),
    "sliding_bonus": Case("qwen2_sliding", (7, 4), (6, None), "bonus", assistant={"layer_types": (SLIDING, FULL)}),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    found = {}
    for name, (family, options) in TARGETS.items():
        folder = tmp_path_factory.mktemp(name)
        make_tiny_target(folder, family, **options)
        found[name] = folder, Reference(folder)
    return found


@dataclass
class Lab:
    """An engine whose drafts are compared with the slow model in every round."""

    engine: Engine
    drafter: FrozenKVDrafter
    rule: ScriptedRule
    requests: list[Request]

    def generate(self) -> dict[str, list[list[int]]]:
        """The drafts of each request, by round."""
        self.engine.generate(self.requests)
        return self.rule.drafts


def make_lab(
    targets: dict[str, tuple[Path, Reference]],
    folder: Path,
    case: Case,
    *,
    prune: str = "none",
    num_draft_tokens: int = 3,
    bucket: int = 1,
) -> Lab:
    target, reference = targets[case.target]
    tensors = make_tiny_assistant(folder, read_model_config(target), **case.assistant)
    requests = [
        replace(request, max_new_tokens=12, ignore_eos=True) for request in random_requests(4, lengths=(2, 14), seed=2)
    ]
    requests[0] = replace(requests[0], prompt_ids=(17,))
    config = make_config(
        (target, folder),
        "frozen_kv",
        num_draft_tokens,
        prune,
        batch_size=3,
        cache={"page_size": PAGE, "prefill_chunk": 5},
        options={"position": case.position},
    )
    engine = make_engine(config, requests)
    engine.parts.cache.kv[:, (NULL_PAGE + 1) * PAGE :] = float("nan")
    engine.graph = PaddedGraph(bucket)
    drafter = engine.parts.drafter
    assert isinstance(drafter, FrozenKVDrafter)
    slow = SlowAssistant(
        tensors,
        reference,
        list(case.sources),
        list(case.windows),
        positions_past_last_key={"last": 0, "bonus": 1}[case.position],
        num_clusters=case.assistant.get("centroid_intermediate_top_k", 0),
    )
    return Lab(engine, drafter, install(engine, slow), requests)


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_slow_model(targets: dict[str, tuple[Path, Reference]], tmp_path: Path, case: str) -> None:
    """They are compared after prompts of one token and of several chunks, and after rounds of every n; slots and pages
    are reused.
    """
    prune = list(PRUNING)[list(CASES).index(case) % len(PRUNING)]
    lab = make_lab(targets, tmp_path, CASES[case], prune=prune)
    lab.generate()
    assert set(lab.rule.accepted) == {0, 1, 2, 3} and lab.rule.compared > 40


@pytest.mark.parametrize("num_draft_tokens", [1, 8])
def test_other_numbers_of_drafts(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, num_draft_tokens: int
) -> None:
    """They run with padded rows, and with pruning of every kind in turn."""
    prune = list(PRUNING)[num_draft_tokens % len(PRUNING)]
    case = CASES["sliding" if num_draft_tokens % 2 else "last_full_layer"]
    lab = make_lab(targets, tmp_path, case, prune=prune, num_draft_tokens=num_draft_tokens, bucket=4)
    lab.generate()
    assert len(set(lab.rule.accepted)) > min(num_draft_tokens, 4) and lab.rule.compared > 25
