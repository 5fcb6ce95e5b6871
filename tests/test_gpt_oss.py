"""gpt-oss beside transformers: sinks, windows in every other layer, YaRN in parts of channels, clamped experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.expert_checkpoint import widened
from spec_lab.checkpoints.families import read_model_config
from tests.covering import each_value
from tests.lab import Reference, generate, make_config, part, random_requests
from tests.target_lane import assert_logits, made_once
from tests.tiny_checkpoints import make_tiny_eagle3
from tests.tiny_gpt_oss import by_formula, make_tiny_gpt_oss, pack_experts

LENGTH = 60
PARTS = {"whole": [LENGTH], "chunks": [24, 1, 4, 31], "rows_of_4": [4] * 15}
FORMS = ("widened", "mxfp4")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the transformers model of a form, made once."""

    def make(folder: Path, form: str) -> Any:
        model = make_tiny_gpt_oss(folder)
        if form == "mxfp4":
            pack_experts(folder, model)
        return model

    return made_once(tmp_path_factory, make)


@pytest.mark.parametrize(("form", "parts"), each_value(FORMS, PARTS, times=2))
def test_logits_equal_transformers(checkpoints: Any, form: str, parts: str) -> None:
    assert_logits(*checkpoints(form), PARTS[parts], 3e-5)


def test_every_code_and_exponent_is_widened_exactly() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    exponents = torch.tensor([0, 1, 100, 126, 127, 128, 140, 200, 254, 5, 60, 90, 119, 133, 2, 250])
    exponents = exponents.to(torch.uint8).view(1, 4, 4)
    assert torch.equal(widened(blocks, exponents).float(), by_formula(blocks, exponents))


@pytest.mark.parametrize("form", FORMS)
def test_greedy_text_is_transformers_whatever_is_drafted(tmp_path: Path, form: str) -> None:
    target, wide, head = (tmp_path / name for name in ("target", "wide", "head"))
    model = make_tiny_gpt_oss(target)
    if form == "mxfp4":
        pack_experts(target, model)
    model.save_pretrained(wide)
    make_tiny_eagle3(head, read_model_config(target), "safeailab" if form == "mxfp4" else "speculators", window=6)
    reference, requests = Reference(wide), random_requests(4, max_new_tokens=16)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    tree = part("tree", "dynamic", topk=2, depth=3, num_rows=6)
    for drafter, prune, changes in (
        ("none", "none", {}),
        ("ngram", "none", {}),
        ("eagle3", "catchup", {"graph": part("graph", "full_loop")}),
        ("eagle3", "none", {"tree": tree}),
    ):
        outputs = generate(make_config((target, head), drafter, prune=prune, batch_size=3, **changes), requests)
        reference.assert_lossless(requests, outputs, plain)
