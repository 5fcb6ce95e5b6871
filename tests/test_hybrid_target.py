"""Targets with gated delta nets, Qwen3.5 and Qwen3-Next, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Reference, generate, make_config, random_requests
from tests.tiny_hybrid import KINDS, VOCAB, make_tiny_hybrid


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        make_tiny_hybrid(folder, kind)
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_transformers(targets: dict[str, Path], kind: str) -> None:
    """Plain and speculative, of one request and of several, with prompts in chunks."""
    folder = targets[kind]
    requests = random_requests(4, 10, vocab_size=VOCAB)
    reference = Reference(folder)
    expected = {request.request_id: reference.greedy(request) for request in requests}
    plain = make_config((folder, folder), "none", cache={"prefill_chunk": 7})
    speculative = make_config((folder, folder), "ngram", 3, batch_size=3)
    for config in (plain, speculative):
        reference.assert_lossless(requests, generate(config, requests), expected)
