"""With drafter=frozen_kv greedy output equals plain decoding, and drafts are accepted in part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.assembly.graphs import FullLoopGraphConfig, RoundGraphConfig, SplitSeedGraphConfig, StepReplayGraphConfig
from spec_lab.assembly.rules import RejectionConfig
from spec_lab.config import GraphConfig, SamplingConfig
from spec_lab.core.types import GenerationResult, Request
from spec_lab.models.config import Family, read_model_config
from tests.fake_target import PaddedGraph
from tests.lab import PRUNING, Reference, make_config, make_engine, poison, random_requests
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_checkpoints import make_tiny_target, rewrite_tensors

VOCAB = 24
FAMILIES: dict[Family, dict[str, Any]] = {
    "qwen3": {"seed": 1, "eos_token_id": [2, 19]},
    "llama": {"num_key_value_heads": 4, "eos_token_id": [2, 18]},
}
BATCHES, DRAFTS, PAGES, CHUNKS = (1, 3, 8), range(1, 9), (1, 4, 16), (1, 5, 512)
MATRIX = list(product(PRUNING, BATCHES))


def teach_bigrams(target: Path, assistant: Path) -> None:
    """Make the pair agree now and then: the target looks more at its last token, the assistant at little else.

    The assistant puts that token's embedding under the target's norm and head, and recycles what it has.
    """
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.6
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    eye = torch.eye(32)
    taught = {
        "pre_projection.weight": torch.cat((eye, 0.1 * eye), dim=1),
        "model.norm.weight": tensors["model.norm.weight"],
        "model.embed_tokens.weight": tensors["lm_head.weight"],
    }
    for name, tensor in load_file(assistant / "model.safetensors").items():
        if "post_" in name and name.endswith("layernorm.weight"):
            taught[name] = 0.2 * tensor
    rewrite_tensors(assistant, taught)


@dataclass
class Lab:
    """A pair, the requests, and what plain decoding makes of them."""

    pair: tuple[Path, Path]
    requests: list[Request]
    reference: Reference
    plain: dict[str, list[int]]

    def run(
        self,
        drafter: str = "frozen_kv",
        prune: str = "none",
        batch_size: int = 1,
        num_draft_tokens: int = 3,
        page_size: int = 16,
        chunk: int = 512,
        bucket: int = 1,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> GenerationResult:
        """Generate on a target cache full of NaN."""
        cache = {"page_size": page_size, "prefill_chunk": chunk}
        config = make_config(
            self.pair, drafter, num_draft_tokens, prune, batch_size=batch_size, cache=cache, options=options or {}
        )
        engine = make_engine(replace(config, **changes), self.requests)
        engine.graph = PaddedGraph(bucket)
        poison(engine)
        return engine.generate(self.requests)

    def check(self, *arguments: Any, **options: Any) -> None:
        self.reference.assert_lossless(self.requests, tokens_of(self.run(*arguments, **options)), self.plain)


def tokens_of(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lab]:
    """Prompts of one token, and longer than chunks; some requests go on past EOS, one has room for one token."""
    requests = random_requests(9, max_new_tokens=15, vocab_size=VOCAB, lengths=(2, 30), seed=4)
    requests[0] = replace(requests[0], prompt_ids=(7,))
    requests[3] = replace(requests[3], max_new_tokens=1)
    for index in (1, 4, 5, 6):
        requests[index] = replace(requests[index], ignore_eos=True)
    found = {}
    for family, options in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        pair = folder / "target", folder / "assistant"
        make_tiny_target(pair[0], family, vocab_size=VOCAB, **options)
        make_tiny_assistant(pair[1], read_model_config(pair[0]), hidden_size=32)
        teach_bigrams(*pair)
        lab = found[family] = Lab(pair, requests, Reference(pair[0]), {})
        lab.plain = tokens_of(lab.run("none"))
    return found


@pytest.mark.parametrize(("prune", "batch_size"), MATRIX, ids=["-".join(map(str, row)) for row in MATRIX])
def test_output_equals_plain_decoding(labs: dict[str, Lab], prune: str, batch_size: int) -> None:
    """K from 1 to 8, page size, chunk, padding, position and family go round with the case."""
    case = MATRIX.index((prune, batch_size))
    labs[list(FAMILIES)[case % 2]].check(
        prune=prune,
        batch_size=batch_size,
        num_draft_tokens=DRAFTS[(5 * case + case // 8) % 8],
        page_size=PAGES[(case + case // 6) % 3],
        chunk=CHUNKS[case // 3 % 3],
        bucket=(1, 4)[case // 2 % 2],
        options={"position": ("last", "bonus")[case // 4 % 2]},
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", DRAFTS)
@pytest.mark.parametrize("prune", PRUNING)
def test_every_number_of_drafts_in_every_mode(labs: dict[str, Lab], prune: str, num_draft_tokens: int) -> None:
    for turn, batch_size in enumerate(BATCHES, start=num_draft_tokens):
        sizes = PAGES[turn % 3], CHUNKS[turn // 2 % 3], (1, 4)[turn % 2]
        labs[list(FAMILIES)[turn // 2 % 2]].check("frozen_kv", prune, batch_size, num_draft_tokens, *sizes)


def test_the_matrix_would_notice(labs: dict[str, Lab]) -> None:
    """Drafts are accepted in part, and blocks are cut by EOS and by limits."""
    accepted, truncated = set(), set()
    for lab in labs.values():
        for record in lab.run(batch_size=8).requests:
            accepted |= set(record.accepted_per_round)
            truncated |= {record.finish_reason.value} if record.truncated else set()
    assert accepted == {0, 1, 2, 3}
    assert truncated == {"eos", "length"}


def test_pruning_changes_no_draft(labs: dict[str, Lab]) -> None:
    """The same drafts are accepted in the same rounds; prune.catchup has nothing to prune, and says so."""
    results = [labs["qwen3"].run(prune=prune, batch_size=8) for prune in PRUNING]
    accepted = [[record.accepted_per_round for record in result.requests] for result in results]
    assert accepted.count(accepted[0]) == len(PRUNING)
    assert all(record.rows.catchup_computed == 0 for result in results for record in result.rounds)


def test_sampled_drafts_are_verified_by_their_own_distribution(labs: dict[str, Lab]) -> None:
    """drafter.draft_sampling=distribution with the standard rejection rule runs, and accepts some."""
    result = labs["qwen3"].run(
        batch_size=3,
        options={"draft_sampling": "distribution"},
        acceptance=RejectionConfig(method="standard"),
        sampling=SamplingConfig(temperature=0.8),
    )
    assert sum(sum(record.accepted_per_round) for record in result.requests) > 3


@pytest.mark.parametrize("head", ["dense", "centroids"])
@pytest.mark.parametrize(
    "graph",
    [StepReplayGraphConfig(), SplitSeedGraphConfig(), FullLoopGraphConfig(), RoundGraphConfig()],
    ids=lambda graph: graph.name,
)
def test_captured_rounds_draft_the_same(labs: dict[str, Lab], tmp_path: Path, graph: GraphConfig, head: str) -> None:
    """Metadata that never moves, under every graph mode; on a CPU they record and replay on a tape."""
    lab = labs["qwen3"]
    if head == "centroids":
        ordered = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}
        make_tiny_assistant(tmp_path, read_model_config(lab.pair[0]), **ordered)
        lab = replace(lab, pair=(lab.pair[0], tmp_path))
    eager = lab.run(batch_size=3, page_size=4)
    config = make_config(lab.pair, "frozen_kv", batch_size=3, cache={"page_size": 4})
    engine = make_engine(replace(config, graph=graph), lab.requests)
    captured = engine.generate(lab.requests)
    assert captured.graph.replays > 0 and captured.graph.fallbacks == 0
    assert [r.accepted_per_round for r in captured.requests] == [r.accepted_per_round for r in eager.requests]
    assert tokens_of(captured) == tokens_of(eager)
