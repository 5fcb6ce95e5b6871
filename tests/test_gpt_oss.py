"""gpt-oss beside transformers: sinks, windows in every other layer, YaRN in parts of channels, clamped experts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gpt_oss_checkpoint import widened
from tests.covering import each_value
from tests.lab import Reference, generate, make_config, random_requests
from tests.tiny_experts import logits_in_parts
from tests.tiny_gpt_oss import by_formula, make_tiny_gpt_oss, pack_experts

LENGTH = 60
PARTS = {"whole": [LENGTH], "chunks": [24, 1, 4, 31], "rows_of_4": [4] * 15}
FORMS = ("widened", "mxfp4")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a form, a text and transformers' logits of it, made once."""

    @cache
    def make(form: str) -> tuple[Path, torch.Tensor, torch.Tensor]:
        folder = tmp_path_factory.mktemp(form)
        model = make_tiny_gpt_oss(folder)
        if form == "mxfp4":
            pack_experts(folder, model)
        token_ids = torch.randint(3, 160, (LENGTH,), generator=torch.Generator().manual_seed(5))
        with torch.inference_mode():
            return folder, token_ids, model(token_ids[None]).logits[0]

    return make


@pytest.mark.parametrize(("form", "parts"), each_value(FORMS, PARTS, times=2))
def test_logits_equal_transformers(checkpoints: Any, form: str, parts: str) -> None:
    folder, token_ids, expected = checkpoints(form)
    logits = logits_in_parts(folder, token_ids, PARTS[parts])
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_the_plan(checkpoints: Any) -> None:
    config = read_model_config(checkpoints("mxfp4")[0])
    assert [plan.window for plan in config.layers] == [8, None, 8, None]
    assert all(plan.sinks and plan.qkv_bias and plan.o_bias for plan in config.layers)
    assert not config.layers[0].rope.whole_channels
    assert config.max_position_embeddings == 512


def test_every_code_and_exponent_is_widened_exactly() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    exponents = torch.tensor([0, 1, 100, 126, 127, 128, 140, 200, 254, 5, 60, 90, 119, 133, 2, 250])
    exponents = exponents.to(torch.uint8).view(1, 4, 4)
    assert torch.equal(widened(blocks, exponents).float(), by_formula(blocks, exponents))


@pytest.mark.parametrize("form", FORMS)
def test_greedy_text_is_transformers_whatever_is_drafted(tmp_path: Path, form: str) -> None:
    target, wide = tmp_path / "target", tmp_path / "wide"
    model = make_tiny_gpt_oss(target)
    if form == "mxfp4":
        pack_experts(target, model)
    model.save_pretrained(wide)
    reference, requests = Reference(wide), random_requests(4, max_new_tokens=16)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    for drafter, batch_size in (("none", 3), ("ngram", 3)):
        outputs = generate(make_config((target, target), drafter, batch_size=batch_size), requests)
        reference.assert_lossless(requests, outputs, plain)
