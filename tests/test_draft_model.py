"""drafter=draft_model against the draft model itself, run by transformers on the whole text for every draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spec_lab
from spec_lab.config.choices import DraftSampling
from spec_lab.config.run import SamplingConfig
from spec_lab.core.kv_cache import NULL_PAGE, SCRATCH_PAGE
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.options.acceptance.lossless import Rejection
from tests.covering import each_value
from tests.engine_state import poison
from tests.fake_target import PaddedGraph
from tests.lab import PRUNING, Reference, generate, make_config, make_engine, random_requests
from tests.layer_rows import LayerRows, count_rows
from tests.scripted_rule import ScriptedRule, install
from tests.tiny_checkpoints import make_tiny_target, refused
from tests.tiny_runs import write_tokenizer

SIZES: dict[str, Any] = {"intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "seed": 5}
DRAFT_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "num_hidden_layers": 2, **SIZES},
    "llama": {"family": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True, **SIZES},
    "qwen2_sliding": {
        "family": "qwen2",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        **SIZES,
    },
}


@dataclass
class SlowModel:
    """A reference without a cache: the whole text goes through the model for every draft. Tokens from `num_tokens` on
    have logit -inf."""

    reference: Reference
    num_tokens: int = 160

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        tokens, all_logits = list(text), []
        for _ in range(num_draft_tokens):
            logits = self.reference.model(torch.tensor([tokens])).logits[0, -1, : self.num_tokens]
            all_logits.append(F.pad(logits, (0, 160 - self.num_tokens), value=float("-inf")))
            tokens.append(int(logits.argmax()))
        return tokens[len(text) :], all_logits


@dataclass
class Pairs:
    """A target and its draft models."""

    target: Path
    drafts: dict[str, tuple[Path, SlowModel]]

    def engine(
        self,
        draft: str,
        prune: str = "none",
        num_draft_tokens: int = 3,
        requests: list[Request] | None = None,
        page_size: int = 4,
    ) -> Engine:
        config = make_config(
            (self.target, self.drafts[draft][0]),
            "draft_model",
            num_draft_tokens,
            prune,
            batch_size=3,
            cache={"page_size": page_size, "prefill_chunk": 5},
        )
        engine = make_engine(config, requests or text_requests())
        poison(engine)
        return engine

    def install(self, engine: Engine, draft: str, script: Callable[[int], int] | None = None) -> ScriptedRule:
        return install(engine, self.drafts[draft][1], script)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    target = tmp_path_factory.mktemp("target")
    make_tiny_target(target, "qwen3")
    drafts = {}
    for name, options in DRAFT_MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        make_tiny_target(folder, **options)
        drafts[name] = folder, SlowModel(Reference(folder))
    return Pairs(target, drafts)


def text_requests(max_new_tokens: int = 18) -> list[Request]:
    """Requests with a prompt of one token, and with prompts of one to several chunks."""
    requests = [
        replace(request, max_new_tokens=max_new_tokens, ignore_eos=True)
        for request in random_requests(4, lengths=(2, 12), seed=2)
    ]
    return [replace(requests[0], prompt_ids=(17,)), *requests[1:]]


def always_all(num_draft_tokens: int) -> int:
    return num_draft_tokens


@pytest.mark.parametrize(("bucket", "draft", "prune"), each_value([1, 4], DRAFT_MODELS, PRUNING))
def test_drafts_equal_the_model_run_on_the_whole_text(pairs: Pairs, draft: str, prune: str, bucket: int) -> None:
    """They are compared after prompts of one token and of several chunks, after rounds of every n, and beside padded
    rows.
    """
    engine = pairs.engine(draft, prune)
    engine.graph = PaddedGraph(bucket)
    rule = pairs.install(engine, draft)
    engine.generate(text_requests())
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 50


@pytest.mark.parametrize(("num_draft_tokens", "prune"), [(1, "catchup"), (8, "none")])
def test_full_acceptance_round_after_round_leaves_no_hole(pairs: Pairs, num_draft_tokens: int, prune: str) -> None:
    """The caches are NaN where nothing was written, so that a key of the last draft that is missing would show."""
    requests = text_requests(max_new_tokens=30)
    engine = pairs.engine("qwen3", prune, num_draft_tokens, requests)
    rule = pairs.install(engine, "qwen3", always_all)
    engine.generate(requests)
    assert set(rule.accepted) == {num_draft_tokens} and len(rule.accepted) >= 4 * 29 // (num_draft_tokens + 1)
    assert rule.compared > 50


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_slots_up_to_l_plus_2k_suffice(pairs: Pairs, num_draft_tokens: int) -> None:
    """A request that fills the cache and is always accepted in full writes no row to the scratch page."""
    requests = [replace(request, max_new_tokens=40) for request in text_requests()[1:2]]
    engine = pairs.engine("qwen3", "none", num_draft_tokens, requests, page_size=1)
    pairs.install(engine, "qwen3", always_all)
    engine.generate(requests)
    caches = (engine.parts.cache.kv, engine.parts.drafter.cache.kv)
    assert all(cache[:, SCRATCH_PAGE].isnan().all() for cache in caches)
    assert all(cache[:, NULL_PAGE].eq(0).all() for cache in caches)


def test_sequences_may_reach_the_last_position(tmp_path: Path) -> None:
    """Drafts past it are cut; those before it equal the whole text's, also in the last round."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    make_tiny_target(target, "qwen3", max_position_embeddings=32)
    make_tiny_target(draft, **DRAFT_MODELS["qwen3"], max_position_embeddings=32)
    requests = [replace(request, max_new_tokens=32 - len(request.prompt_ids)) for request in text_requests()]
    outputs = {}
    for drafter in ("none", "draft_model"):
        outputs[drafter] = generate(make_config((target, draft), drafter, 5, "catchup", batch_size=3), requests)
    Reference(target).assert_lossless(requests, outputs["draft_model"], outputs["none"])


EXPECTED_ROWS = {
    "none": ([5, 3, 1, 1, 4, 1, 1], [5, 3, 1, 1, 4, 1, 1]),
    "prefill": ([1, 1, 1, 4, 1, 1], [1, 1, 1, 4, 1, 1]),
    "post_attention": ([1, 1, 1, 4, 1, 1], [1, 1, 1, 1, 1, 1]),
    "catchup": ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("prune", PRUNING)
def test_rows_past_the_kv_write_of_the_last_layer(pairs: Pairs, prune: str) -> None:
    """The engine reads 7 prompt tokens in two chunks, the last with the sampled token, takes two draft steps, a catch-
    up and two more.
    """
    requests = [Request("seven", "x", (5, 6, 7, 8, 9, 10, 11), max_new_tokens=2)]
    engine = pairs.engine("qwen3", prune, requests=requests)
    first, last = (count_rows(layer) for layer in engine.parts.drafter.model.layers)
    engine.generate(requests)
    attended, computed = EXPECTED_ROWS[prune]
    assert last == LayerRows(attended, computed, computed)
    assert first.mlp == [5, 3, 1, 1, 4, 1, 1], "what the last layer's keys and values are made of"


@pytest.mark.parametrize("vocab_size", [120, 168])
def test_vocabularies_may_differ_in_padding(pairs: Pairs, tmp_path: Path, vocab_size: int) -> None:
    """The target's has 160 tokens. Tokens that only one of the two has are neither drafted nor emitted."""
    make_tiny_target(tmp_path, "qwen3", vocab_size=vocab_size, num_hidden_layers=2, seed=5)
    num_tokens = min(160, vocab_size)
    requests = [replace(each, ignore_eos=True) for each in random_requests(4, vocab_size=num_tokens, lengths=(1, 12))]
    config = make_config((pairs.target, tmp_path), "draft_model", batch_size=3, cache={"page_size": 4})
    engine = make_engine(config, requests)
    target = SlowModel(Reference(pairs.target), num_tokens)
    texts = {each.request_id: each.output_ids for each in engine.generate(requests).requests}
    assert texts == {each.request_id: target.draft(list(each.prompt_ids), 24)[0] for each in requests}
    rule = install(engine, SlowModel(Reference(tmp_path), num_tokens))
    engine.generate(requests)
    assert rule.compared > 50
    options = {"draft_sampling": DraftSampling.distribution}
    sampled = make_config((pairs.target, tmp_path), "draft_model", batch_size=3, options=options)
    sampled = replace(sampled, acceptance=Rejection(), sampling=SamplingConfig(temperature=1.0))
    records = make_engine(sampled, requests).generate(requests).requests
    assert max(max(each.output_ids) for each in records) < num_tokens


@pytest.mark.parametrize("vocab_size", [160, 168])
def test_another_tokenizer_is_said_in_the_record(
    tmp_path: Path, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of both that are other tokens are counted. With vocabularies of other sizes too the run is refused."""
    monkeypatch.chdir(tmp_path)
    target, draft = tmp_path / "target", tmp_path / "draft"
    make_tiny_target(target, "qwen3", num_hidden_layers=2)
    make_tiny_target(draft, "qwen3", num_hidden_layers=1, vocab_size=vocab_size)
    for folder in (target, draft):
        write_tokenizer(folder)
    overrides = [
        *("target=hf", f"target.path={target}", "drafter=draft_model", f"drafter.path={draft}", "references=[]"),
        *("workload=random_ids", "workload.limit=1", "max_new_tokens=4", "repeats=1", "profile_rounds=0"),
    ]

    def notes() -> list[str]:
        return [note for note in spec_lab.run(spec_lab.compose(overrides)).run.notes if "tokenizer" in note]

    assert notes() == []
    tokens = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokens))
    if vocab_size != 160:
        with refused(draft, "2 ids of its tokenizer", "drafter.path"):
            spec_lab.run(spec_lab.compose(overrides))
        return
    (warning,) = notes()
    assert warning.startswith(f"{draft}: 2 ids of its tokenizer")
