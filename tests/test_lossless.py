"""Greedy speculative output equals plain decoding and transformers' generate, token for token, in float32.

Where it differs, plain decoding must have been within NEAR_TIE of another token (design: lossless); `test_engine.py`
has the exact form of it on a target without ties. The vocabulary is tiny, the head knows bigrams and the draft model is
the target's first layers, so that drafts are accepted in part and EOS falls inside blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.core.types import GenerationResult, Request
from spec_lab.drafters.oracle import OracleDrafter
from tests.fake_target import PaddedGraph
from tests.lab import PRUNING, Reference, make_config, make_engine, make_pair, poison, random_requests
from tests.tiny_checkpoints import keep_first_layers

VOCAB = 24
DRAFTERS = ("none", "eagle3", "draft_model", "ngram", "oracle", "random")
BATCHES, DRAFTS, PAGES, CHUNKS = (1, 3, 8), (1, 3, 5), (1, 4, 16), (1, 5, 512)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "seed": 1, "eos_token_id": [2, 19]},
    "llama": {"family": "llama", "num_key_value_heads": 4, "eos_token_id": [2, 18]},
    "qwen2_sliding": {
        "family": "qwen2",
        "seed": 1,
        "eos_token_id": 16,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 4,
    },
}


def mixed_requests() -> list[Request]:
    """Prompts of 1 token, shorter than K, and longer than chunks and windows; limits from 1 up; some past EOS."""
    requests = random_requests(9, max_new_tokens=15, vocab_size=VOCAB, lengths=(2, 30), seed=4)
    requests[0] = replace(requests[0], prompt_ids=(7,))
    requests[1] = replace(requests[1], prompt_ids=(9,), ignore_eos=True)
    requests[2] = replace(requests[2], prompt_ids=(9, 4, 9))
    requests[3] = replace(requests[3], max_new_tokens=1)
    requests[4] = replace(requests[4], max_new_tokens=7, ignore_eos=True)
    requests[5] = replace(requests[5], ignore_eos=True)
    requests[6] = replace(requests[6], ignore_eos=True)
    return requests


def teach_bigrams(pair: tuple[Path, Path]) -> None:
    """Make the pair agree now and then: the target looks more at its last token, and the head at nothing else.

    The head's attention copies the embedding of the rows with the same token, under the target's norm and head.
    """
    target, head = (load_file(folder / "model.safetensors") for folder in pair)
    for name in target:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            target[name] *= 0.6
    eye, nothing, attention = torch.eye(32), torch.zeros(32, 32), "midlayer.self_attn."
    pick_embedding = torch.cat((eye, nothing), dim=1)
    head["fc.weight"] *= 0.2
    head["midlayer.mlp.down_proj.weight"] *= 0.2
    head["midlayer.input_layernorm.weight"] = torch.ones(32)
    head[f"{attention}v_proj.weight"] = pick_embedding
    head[f"{attention}k_proj.weight"] = 2 * pick_embedding
    head[f"{attention}q_proj.weight"] = 2 * pick_embedding.view(2, 16, 64).repeat_interleave(2, dim=0).view(64, 64)
    merge = eye.view(32, 2, 16).repeat_interleave(2, dim=1).reshape(32, 64) / 2
    head[f"{attention}o_proj.weight"] = merge.contiguous()
    head["norm.weight"] = target["model.norm.weight"].clone()
    head["lm_head.weight"] = target["lm_head.weight"][head["t2d"]].clone()
    for folder, tensors in zip(pair, (target, head), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tokens_of(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


@dataclass
class Lab:
    """A target, its drafters with weights, the requests, and what plain decoding and transformers make of them."""

    target: Path
    weights: dict[str, Path]
    requests: list[Request]
    reference: Reference
    plain: dict[str, list[int]]
    transformers: dict[str, list[int]]

    def pair(self, drafter: str) -> tuple[Path, Path]:
        return self.target, self.weights.get(drafter, self.target)

    def run(
        self,
        drafter: str,
        prune: str = "none",
        batch_size: int = 1,
        num_draft_tokens: int = 3,
        page_size: int = 16,
        chunk: int = 512,
        bucket: int = 1,
    ) -> GenerationResult:
        """Generate on caches full of NaN."""
        cache = {"page_size": page_size, "prefill_chunk": chunk}
        config = make_config(self.pair(drafter), drafter, num_draft_tokens, prune, batch_size=batch_size, cache=cache)
        engine = make_engine(config, self.requests)
        engine.graph = PaddedGraph(bucket)
        poison(engine)
        if isinstance(engine.parts.drafter, OracleDrafter):
            engine.parts.drafter.learn(self.plain)
        return engine.generate(self.requests)

    def check(self, drafter: str, *arguments: Any, **options: Any) -> GenerationResult:
        result = self.run(drafter, *arguments, **options)
        self.reference.assert_lossless(self.requests, tokens_of(result), self.plain)
        return result


def make_lab(folder: Path, family: str) -> Lab:
    requests = mixed_requests()
    options = dict(FAMILIES[family])
    target, head = pair = make_pair(folder, options.pop("family"), vocab_size=VOCAB, **options)
    teach_bigrams(pair)
    draft_model = folder / "draft_model"
    keep_first_layers(draft_model, target, 3)
    reference = Reference(target)
    weights = {"eagle3": head, "draft_model": draft_model}
    lab = Lab(target, weights, requests, reference, {}, {r.request_id: reference.greedy(r) for r in requests})
    lab.plain = tokens_of(lab.run("none"))
    return lab


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lab]:
    return {family: make_lab(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_transformers_generate(labs: dict[str, Lab], family: str) -> None:
    lab = labs[family]
    lab.reference.assert_lossless(lab.requests, lab.plain, lab.transformers)
    lengths = [len(lab.plain[request.request_id]) for request in lab.requests]
    limits = [request.max_new_tokens for request in lab.requests]
    assert lengths != limits, "some request stops at EOS"
    stops = make_engine(make_config(lab.pair("none"), "none"), lab.requests).parts.target.eos_token_ids
    assert any(stops & set(lab.plain[request.request_id][:-1]) for request in lab.requests), "some go on past EOS"


MATRIX = list(product(DRAFTERS, PRUNING, BATCHES))


@pytest.mark.parametrize(("drafter", "prune", "batch_size"), MATRIX, ids=["-".join(map(str, row)) for row in MATRIX])
def test_speculative_output_equals_plain_decoding(
    labs: dict[str, Lab], drafter: str, prune: str, batch_size: int
) -> None:
    """K, page size, chunk, padding and family go round with the case, so that every drafter meets all of them."""
    case = MATRIX.index((drafter, prune, batch_size))
    labs[list(FAMILIES)[(case + case // 3) % 3]].check(
        drafter,
        prune,
        batch_size,
        num_draft_tokens=DRAFTS[(case + case // 9) % 3],
        page_size=PAGES[(case + case // 6) % 3],
        chunk=CHUNKS[case // 3 % 3],
        bucket=(1, 4)[case // 2 % 2],
    )


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_every_number_of_drafts(labs: dict[str, Lab], drafter: str, num_draft_tokens: int) -> None:
    """K from 1 to 8; mode, batch and family go round, differently for the two (slow tests: all of them)."""
    turn = num_draft_tokens + (2 if drafter == "eagle3" else 0)
    labs[list(FAMILIES)[turn // 3 % 3]].check(
        drafter,
        list(PRUNING)[turn % 4],
        batch_size=BATCHES[turn % 3],
        num_draft_tokens=num_draft_tokens,
        page_size=PAGES[turn // 2 % 3],
        chunk=CHUNKS[(turn + 1) % 3],
        bucket=(1, 4)[turn // 2 % 2],
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("prune", PRUNING)
@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_every_number_of_drafts_in_every_mode(
    labs: dict[str, Lab], drafter: str, prune: str, num_draft_tokens: int
) -> None:
    for turn, batch_size in enumerate(BATCHES, start=num_draft_tokens):
        page_size, chunk = PAGES[turn % 3], CHUNKS[turn // 2 % 3]
        family, bucket = list(FAMILIES)[turn // 3 % 3], (1, 4)[turn % 2]
        labs[family].check(drafter, prune, batch_size, num_draft_tokens, page_size, chunk, bucket)


def test_the_matrix_would_notice(labs: dict[str, Lab]) -> None:
    """Drafts are accepted in part by each drafter, and blocks are cut by EOS and by limits."""
    expected = {
        "eagle3": {0, 1, 2, 3},
        "draft_model": {0, 1, 2, 3},
        "ngram": {0, 1, 2, 3},
        "random": {0, 1},
        "oracle": {3},
    }
    truncated = set()
    for drafter, wanted in expected.items():
        accepted = set()
        for family in FAMILIES:
            for record in labs[family].run(drafter, "catchup", batch_size=8).requests:
                accepted |= set(record.accepted_per_round)
                truncated |= {record.finish_reason.value} if record.truncated else set()
                if drafter == "oracle":
                    assert set(record.accepted_per_round[:-1]) <= {3}, "the oracle is wrong past the end only"
        assert wanted <= accepted, drafter
    assert truncated == {"eos", "length"}


def test_pruning_changes_no_draft(labs: dict[str, Lab]) -> None:
    """Not only the output: the same drafts are accepted in the same rounds."""
    lab = labs["qwen3"]
    for drafter in ("eagle3", "draft_model"):
        accepted = [
            [record.accepted_per_round for record in lab.run(drafter, prune, batch_size=8).requests]
            for prune in PRUNING
        ]
        assert accepted.count(accepted[0]) == len(PRUNING)


def test_few_pages_change_nothing(labs: dict[str, Lab]) -> None:
    """Admission waits; slots are reused by requests of other lengths."""
    lab = labs["llama"]
    cache = {"page_size": 4, "num_pages": 2 + 20}
    engine = make_engine(
        make_config(lab.pair("eagle3"), "eagle3", 3, "catchup", batch_size=8, cache=cache), lab.requests
    )
    poison(engine)
    for _ in range(2):
        result = engine.generate(lab.requests)
        lab.reference.assert_lossless(lab.requests, tokens_of(result), lab.plain)
        assert max(len(record.request_ids) for record in result.rounds) < 8


def test_the_helper_accepts_near_ties_only(labs: dict[str, Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    lab = labs["qwen3"]
    outputs = {key: list(tokens) for key, tokens in lab.plain.items()}
    wrong = lab.requests[5].request_id
    outputs[wrong][4] = (outputs[wrong][4] + 1) % VOCAB
    with pytest.raises(AssertionError, match="token 4 differs"):
        lab.reference.assert_lossless(lab.requests, outputs, lab.plain)
    monkeypatch.setattr(lab.reference, "margin", lambda token_ids: 5e-5)
    lab.reference.assert_lossless(lab.requests, outputs, lab.plain)
    outputs[wrong] = lab.plain[wrong][:-1]
    with pytest.raises(AssertionError, match="not as long"):
        lab.reference.assert_lossless(lab.requests, outputs, lab.plain)


@torch.inference_mode()
def test_margin_is_the_distance_of_the_two_best_tokens(labs: dict[str, Lab]) -> None:
    reference = labs["qwen3"].reference
    logits = sorted(reference.model(torch.tensor([[5, 6, 7]])).logits[0, -1].tolist())
    assert reference.margin([5, 6, 7]) == pytest.approx(logits[-1] - logits[-2])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("prune", PRUNING)
def test_every_combination(labs: dict[str, Lab], family: str, drafter: str, prune: str) -> None:
    """All pairs of batch and K; page sizes and chunks as Latin squares over them."""
    for i, j in product(range(3), range(3)):
        page_size, chunk, bucket = PAGES[(i + j) % 3], CHUNKS[(i + 2 * j) % 3], (1, 4)[(i + j) % 2]
        labs[family].check(drafter, prune, BATCHES[i], DRAFTS[j], page_size, chunk, bucket)
