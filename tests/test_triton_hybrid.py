"""Gated delta nets on Triton's kernels against those in torch: layers over rounds, and whole engines in graph modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from spec_kernels.delta_chunks import CHUNK
from spec_kernels.norms import rms_norm
from spec_kernels.utils import INTERPRETED
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.caches import cache_maker, cache_row
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.checkpoints.tensor_shapes import delta_net_tensor_shapes
from spec_lab.config.choices import Rollback
from spec_lab.config.run import RecurrentConfig, Run
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata, FeatureSpec
from spec_lab.engine.states import SlotStates
from spec_lab.models.delta_net import build_delta_net
from spec_lab.models.norms import Float32Norm
from spec_lab.models.target_loader import WeightSource, load_target
from spec_lab.operators.triton_layers import TwoWays
from spec_lab.operators.triton_linear import TritonNorm
from spec_lab.operators.triton_set import triton_set
from tests.graph_lab import MODES
from tests.kept_states import spoil_unread
from tests.kernel_lab import DEVICE, LaunchedKernels, randn
from tests.lab import make_config, random_requests
from tests.test_kernels_wiring import make_engine, outcome
from tests.tiny_hybrid import VOCAB, make_tiny_nextn

HIDDEN, NUM_SLOTS, MOST_ROWS = 24, 3, 4
SIZES = DeltaNetSizes(1, 2, 8, 12, 4)
NOTHING = torch.zeros(0, dtype=torch.int64)
OF_ROLLBACK = {
    Rollback.checkpoints: {"delta_inputs", "delta_rule", "gated_norm"},
    Rollback.replay: {"delta_inputs", "delta_rule", "delta_replay", "keep_delta_rows", "gated_norm"},
}
"""The kernels that a prompt and rounds launch."""
EVERYWHERE = [("eager", rollback) for rollback in Rollback]
IN_GRAPHS = EVERYWHERE if INTERPRETED else [(mode, rollback) for mode in ("eager", *MODES) for rollback in Rollback]
"""The interpreter takes ten seconds for each."""


class Lane:
    """A layer of given weights on some parts, with a cache of its own."""

    def __init__(self, kernels: KernelSet, rollback: Rollback, dtype: torch.dtype) -> None:
        shapes = delta_net_tensor_shapes(SIZES, HIDDEN)
        tensors = {name: 0.5 * randn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
        kept = {name: tensor if name in ("A_log", "dt_bias") else tensor.to(dtype) for name, tensor in tensors.items()}
        self.layer = build_delta_net(SIZES, kept, "", 1e-6, kernels=kernels)
        make = cache_maker(kernels, rollback)
        self.cache = make(SIZES, NUM_SLOTS, MOST_ROWS, dtype, DEVICE)
        self.states = SlotStates([self.cache])

    def run(self, rows: torch.Tensor, num_queries: int, recurrent: Any) -> torch.Tensor:
        metadata = AttentionMetadata(
            rows[:, 0], NOTHING, recurrent.slot_ids, NOTHING, num_queries, 0, recurrent=recurrent
        )
        return self.layer.o(self.layer(rows, Pass(self.cache, metadata)))

    def text(self, dtype: torch.dtype, num_rounds: int) -> list[torch.Tensor]:
        """Run prompts in chunks, and rounds of every number of rows; what a round may not read is spoilt before."""
        draw, outputs = torch.Generator().manual_seed(0), []
        slots = torch.tensor([2, 0, NUM_SLOTS], device=DEVICE)
        for slot, chunks in ((2, (4, 1)), (0, (1,))):
            self.states.clear(slot)
            for seed, length in enumerate(chunks):
                rows = randn(length, HIDDEN, seed=seed, dtype=dtype)
                outputs.append(self.run(rows, length, self.states.of_prompts(torch.tensor([slot], device=DEVICE))))
        for index in range(num_rounds):
            num_rows = int(torch.randint(1, MOST_ROWS + 1, (), generator=draw))
            rows = randn(3 * num_rows, HIDDEN, seed=10 + index, dtype=dtype)
            found = self.run(rows, num_rows, self.states.of_round(slots)).unflatten(0, (3, num_rows))
            outputs.append(found[:2])
            last = torch.randint(0, num_rows, (3,), generator=draw)
            last[2] = 0
            self.states.commit(slots, last.to(DEVICE))
            for slot in (2, 0):
                spoil_unread(self.cache, slot, int(self.states.committed[slot]), SIZES.history)
        return outputs


@torch.inference_mode()
@pytest.mark.parametrize("rollback", Rollback)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_long_prompt_is_run_in_chunks_where_the_model_has_16_bits(dtype: torch.dtype, rollback: Rollback) -> None:
    rows, slot = randn(CHUNK + 9, HIDDEN, seed=5, dtype=dtype), torch.tensor([1], device=DEVICE)
    outputs = []
    for kernels in (TORCH_FORMS, triton_set()):
        lane = Lane(kernels, rollback, dtype)
        with LaunchedKernels() as launched:
            outputs.append(lane.run(rows, len(rows), lane.states.of_prompts(slot)))
    assert ("delta_chunks" in launched.names) == (dtype == torch.float16)
    assert_close(outputs[1], outputs[0], rtol=2e-2, atol=2e-2)


@torch.inference_mode()
@pytest.mark.parametrize("rollback", Rollback)
def test_a_layer_equals_torch_over_rounds(rollback: Rollback) -> None:
    """Outputs of prompts and of rounds after which any number of rows stays, beside a padded row."""
    expected = Lane(TORCH_FORMS, rollback, torch.float32).text(torch.float32, 4)
    found = Lane(triton_set(), rollback, torch.float32).text(torch.float32, 4)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_tiny_nextn(folder)
    return folder


def config_of(folder: Path, kernels: str, rollback: Rollback, mode: str) -> Run:
    config = make_config(
        (folder, folder),
        "mtp_eagle",
        3,
        "catchup",
        batch_size=2,
        device=DEVICE.type,
        dtype="float32",
        kernels=kernels,
        cache={"page_size": 4, "prefill_chunk": 5},
        recurrent=RecurrentConfig(rollback),
    )
    return config if mode == "eager" else replace(config, graph=MODES[mode])


@pytest.mark.parametrize(("mode", "rollback"), IN_GRAPHS)
def test_an_engine_gives_the_tokens_of_torch(folder: Path, mode: str, rollback: Rollback) -> None:
    requests = random_requests(2, 3, vocab_size=VOCAB, lengths=(1, 7))
    expected = make_engine(config_of(folder, "torch", rollback, "eager"), requests).generate(requests)
    engine = make_engine(config_of(folder, "triton", rollback, mode), requests)
    with LaunchedKernels() as launched:
        result = engine.generate(requests)
    assert outcome(result) == outcome(expected)
    assert launched.names >= OF_ROLLBACK[rollback] and "strict_accept" in launched.names


@torch.inference_mode()
def test_few_rows_in_16_bits_go_through_the_fused_products(folder: Path) -> None:
    """Norms of float32 weights, delta nets and gated attention: a prompt, and two rounds behind it."""
    config = read_model_config(folder)
    outputs = []
    for kernels in (TORCH_FORMS, triton_set()):
        backend = TorchAttention(4, 64)
        target = load_target(config, WeightSource(folder, torch.float16, DEVICE), backend, 64, kernels)
        assert all(isinstance(layer, TwoWays) == (kernels is not TORCH_FORMS) for layer in target.layers)
        nets = {index: plan.delta_net for index, plan in enumerate(config.layers) if plan.delta_net is not None}
        make = cache_maker(kernels, Rollback.checkpoints)
        recurrent: Any = {index: make(net, 1, 3, torch.float16, DEVICE) for index, net in nets.items()}
        cache = PagedKVCache([cache_row(plan) for plan in config.layers], 12, 4, torch.float16, DEVICE, recurrent)
        states, first = SlotStates(cache.recurrent), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        found, start = [], 0
        for num_rows, recurrent_rows in ((5, states.of_prompts), (3, states.of_round), (2, states.of_round)):
            positions = torch.arange(start, start + num_rows, device=DEVICE).unsqueeze(0)
            pages = torch.arange(2, 12, device=DEVICE).unsqueeze(0)
            lens = torch.tensor([start + num_rows], device=DEVICE)
            metadata = backend.build(positions, lens, pages, start + num_rows)
            metadata.recurrent = recurrent_rows(first)
            tokens = torch.arange(7 + start, 7 + start + num_rows, device=DEVICE)
            output = target.forward(tokens, Pass(cache, metadata), FeatureSpec())
            found.append(target.logits(output.hidden).float())
            start += num_rows if start == 0 else 2
            states.commit(first, first + (0 if start == 5 else 1))
        outputs.append(found)
    for ours, theirs in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))


def test_a_norm_with_a_float32_weight_rounds_once() -> None:
    """Of 1 + w of a small w nothing would be left in 16 bits."""
    rows, weight = randn(5, 40, seed=1, dtype=torch.float16), 1 + 1e-3 * randn(40, seed=2)
    out = rms_norm(rows, weight, 1e-6)
    assert (out.float() - Float32Norm(weight, 1e-6)(rows).float()).abs().max() <= 2**-9, "the last bit of float16"
    assert not torch.equal(out, TritonNorm(weight.half(), 1e-6)(rows))
