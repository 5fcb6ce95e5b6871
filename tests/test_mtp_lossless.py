"""Greedy output with drafter=mtp_eagle equals plain decoding, token for token, with NaN in every unwritten row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.core.types import GenerationResult, Request
from spec_lab.models.config import read_model_config
from tests.fake_target import PaddedGraph
from tests.lab import PRUNING, Reference, make_config, make_engine, poison, random_requests
from tests.tiny_checkpoints import make_tiny_target, rewrite_tensors
from tests.tiny_mtp import make_tiny_mtp

VOCAB = 24
BATCHES, DRAFTS, PAGES, CHUNKS = (1, 3, 8), range(1, 9), (1, 4, 16), (1, 5, 512)
MATRIX = list(product(PRUNING, BATCHES))


def mixed_requests() -> list[Request]:
    """Prompts of one token, shorter than K, and longer than a chunk; limits from 1 up; some past EOS."""
    requests = random_requests(9, max_new_tokens=14, vocab_size=VOCAB, lengths=(2, 20), seed=4)
    requests[0] = replace(requests[0], prompt_ids=(7,))
    requests[1] = replace(requests[1], max_new_tokens=1)
    return [replace(request, ignore_eos=index % 3 == 0) for index, request in enumerate(requests)]


def make_them_agree_now_and_then(target: Path, module: Path) -> None:
    """The target looks more at its last token than at others, and the module at nothing else."""
    trunk, ours, prefix = (
        load_file(target / "model.safetensors"),
        load_file(module / "model.safetensors"),
        "model.layers.8.",
    )
    outputs = ("o_proj.weight", "down_proj.weight")
    rewrite_tensors(target, {name: 0.35 * tensor for name, tensor in trunk.items() if name.endswith(outputs)})
    ones, eye = torch.ones(32), torch.eye(32)
    rewrite_tensors(
        module,
        {name: 0.1 * tensor for name, tensor in ours.items() if name.endswith(outputs)}
        | {
            f"{prefix}enorm.weight": ones,
            f"{prefix}eh_proj.weight": torch.cat((eye, 0.2 * ours[f"{prefix}eh_proj.weight"][:, 32:]), dim=1),
            f"{prefix}shared_head.norm.weight": trunk["model.norm.weight"],
        },
    )


def tokens_of(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


@dataclass
class Lab:
    pair: tuple[Path, Path]
    requests: list[Request]
    reference: Reference
    plain: dict[str, list[int]]

    def run(
        self,
        drafter: str = "mtp_eagle",
        prune: str = "none",
        batch_size: int = 1,
        num_draft_tokens: int = 3,
        page_size: int = 16,
        chunk: int = 512,
        bucket: int = 1,
    ) -> GenerationResult:
        cache = {"page_size": page_size, "prefill_chunk": chunk}
        config = make_config(self.pair, drafter, num_draft_tokens, prune, batch_size=batch_size, cache=cache)
        engine = make_engine(config, self.requests)
        engine.graph = PaddedGraph(bucket)
        poison(engine)
        return engine.generate(self.requests)

    def check(self, prune: str, batch_size: int, num_draft_tokens: int, *sizes: int) -> None:
        """`sizes` of page, chunk and bucket."""
        result = self.run("mtp_eagle", prune, batch_size, num_draft_tokens, *sizes)
        self.reference.assert_lossless(self.requests, tokens_of(result), self.plain)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    target, module = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("module")
    make_tiny_target(target, "qwen3", vocab_size=VOCAB, seed=1, eos_token_id=[2, 19])
    make_tiny_mtp(module, "ours", read_model_config(target))
    make_them_agree_now_and_then(target, module)
    lab = Lab((target, module), mixed_requests(), Reference(target), {})
    lab.plain = tokens_of(lab.run("none"))
    return lab


@pytest.mark.parametrize(("prune", "batch_size"), MATRIX)
def test_speculative_output_equals_plain_decoding(lab: Lab, prune: str, batch_size: int) -> None:
    """K from 1 to 8, page size, chunk and padding go round with the case."""
    case = MATRIX.index((prune, batch_size))
    num_draft_tokens = DRAFTS[(5 * case + case // 8) % 8]
    sizes = PAGES[(case + case // 3) % 3], CHUNKS[case // 2 % 3], (1, 4)[case // 2 % 2]
    lab.check(prune, batch_size, num_draft_tokens, *sizes)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", DRAFTS)
@pytest.mark.parametrize("prune", PRUNING)
def test_every_number_of_drafts_in_every_mode(lab: Lab, prune: str, num_draft_tokens: int) -> None:
    for turn, batch_size in enumerate(BATCHES, start=num_draft_tokens):
        lab.check(prune, batch_size, num_draft_tokens, PAGES[turn % 3], CHUNKS[turn // 2 % 3], (1, 4)[turn % 2])


def test_the_matrix_would_notice(lab: Lab) -> None:
    """Drafts are accepted in part, the same ones whatever is pruned, and blocks are cut by EOS and by limits."""
    results = [lab.run(prune=prune, batch_size=8) for prune in ("none", "catchup")]
    accepted = [[record.accepted_per_round for record in result.requests] for result in results]
    assert accepted[0] == accepted[1]
    assert {count for rounds in accepted[0] for count in rounds} == {0, 1, 2, 3}
    cut = {record.finish_reason.value for record in results[0].requests if record.truncated}
    assert cut == {"eos", "length"}
