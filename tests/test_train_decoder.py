"""Decoders of the three other families as trained: saved, transformers' own classes compute the same from the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.models.delta_rule import DeltaRows, delta_row_by_row
from spec_lab.train.decoder import TrainableDecoder
from spec_lab.train.decoder_checkpoint import as_saved, from_saved
from spec_lab.train.delta_net import gated_delta_rule, inverse_of_unit_lower
from spec_lab.train.experts import BIAS_STEP, TrainableRouter
from spec_lab.train.gemma4 import TrainableGemma4
from tests.tiny_pockets import GEMMA, HYBRID, MOE

FAMILIES: dict[str, tuple[type[TrainableDecoder], dict[str, Any], bool]] = {
    "hybrid": (TrainableDecoder, HYBRID, True),
    "gemma": (TrainableGemma4, GEMMA, False),
    "moe": (TrainableDecoder, MOE, False),
}


def random_decoder(family: str) -> TrainableDecoder:
    kind, keys, _ = FAMILIES[family]
    torch.manual_seed(3)
    decoder = kind(keys).eval().requires_grad_(False)
    for name, tensor in decoder.state_dict().items():
        if not name.endswith(("A_log", "dt_bias")):
            tensor.add_(0.1 * torch.randn_like(tensor))
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_decoder_computes_what_transformers_computes_from_the_files(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, keys, zero_centred = FAMILIES[family]
    decoder = random_decoder(family)
    saved = as_saved(decoder.state_dict(), zero_centred)
    save_file({name: tensor.contiguous() for name, tensor in saved.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(keys))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, trust_remote_code=False).eval()
    tokens = torch.randint(0, keys["vocab_size"], (2, 70))
    ours = decoder(tokens)
    with torch.no_grad():
        theirs = reference(input_ids=tokens, use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.hidden_states[-1], theirs.hidden_states[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_read_again(family: str) -> None:
    decoder = random_decoder(family)
    _, _, zero_centred = FAMILIES[family]
    again = from_saved(as_saved(decoder.state_dict(), zero_centred), zero_centred)
    torch.testing.assert_close(again, dict(decoder.state_dict()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["hybrid", "moe"])
def test_parameters_are_those_that_the_runtime_reads(family: str) -> None:
    decoder = random_decoder(family)
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    assert shapes == decoder_tensor_shapes(decoder.config.model)


def test_chunks_of_the_delta_rule_are_its_rows_one_after_another() -> None:
    torch.manual_seed(0)
    batch, num_rows, heads = 2, 43, 3
    queries, keys = torch.nn.functional.normalize(torch.randn(2, batch, num_rows, heads, 8), dim=-1)
    values = torch.randn(batch, num_rows, heads, 5)
    log_decay, strength = -torch.rand(batch, num_rows, heads), torch.rand(batch, num_rows, heads)
    rows = DeltaRows(queries, keys, values, log_decay, strength)
    expected = torch.stack([out for out, _ in delta_row_by_row(rows, torch.zeros(batch, heads, 8, 5))], dim=1)
    outputs = gated_delta_rule(queries, keys, values, log_decay, strength, chunk_size=16)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_the_delta_rule_are_those_of_its_rows_one_after_another() -> None:
    torch.manual_seed(0)
    batch, num_rows, heads = 2, 43, 3
    queries, keys = torch.nn.functional.normalize(torch.randn(2, batch, num_rows, heads, 8), dim=-1)
    parts = [queries, keys, torch.randn(batch, num_rows, heads, 5)]
    parts += [-torch.rand(batch, num_rows, heads), torch.rand(batch, num_rows, heads)]
    weights = torch.randn(batch, num_rows, heads, 5)

    def gradients(rule: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [part.clone().requires_grad_() for part in parts]
        return torch.autograd.grad((rule(*leaves) * weights).sum(), leaves)

    def row_by_row(*leaves: Tensor) -> Tensor:
        outputs = delta_row_by_row(DeltaRows(*leaves), torch.zeros(batch, heads, 8, 5))
        return torch.stack([output for output, _ in outputs], dim=1)

    in_chunks = gradients(lambda *leaves: gated_delta_rule(*leaves, chunk_size=16))
    torch.testing.assert_close(in_chunks, gradients(row_by_row), atol=1e-5, rtol=1e-5)


def test_the_inverse_holds_where_a_power_series_would_not() -> None:
    """Equal keys, written with full strength and never forgotten: powers of such a matrix reach 1e9."""
    matrix = torch.ones(2, 32, 32).tril(-1)
    identity = torch.eye(32).expand(2, 32, 32)
    assert torch.equal(inverse_of_unit_lower(matrix) @ (matrix + identity), identity)


def test_a_router_moves_its_bias_towards_experts_that_are_chosen_too_seldom() -> None:
    sizes = TrainableDecoder(MOE).config.model.layers[-1].experts
    assert sizes is not None
    router = TrainableRouter(sizes, 4)
    nn.init.zeros_(router.weight)
    router.weight.data[:2] = 1.0
    weights = router(torch.ones(5, 4))
    assert torch.equal(weights.sum(-1), torch.full((5,), sizes.scaling))
    assert torch.equal(weights[:, 2:], torch.zeros(5, sizes.num_experts - 2))
    moved = torch.full((sizes.num_experts,), BIAS_STEP)
    moved[:2] = -BIAS_STEP
    torch.testing.assert_close(router.e_score_correction_bias, moved)
    router.eval()(torch.ones(5, 4))
    torch.testing.assert_close(router.e_score_correction_bias, moved)
