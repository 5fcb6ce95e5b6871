"""Models whose few rows go through the fused kernels, against the same models without, in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.rope_write import rope_write
from spec_lab.attention.triton_backend import TritonAttention
from spec_lab.build.caches import cache_row
from spec_lab.build.kernels import make_kernels
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.keep_narrow import FP8, with_narrow_products, with_wide_products
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.random_weights import random_eagle3, random_mtp, random_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.kept import ALL_ROWS, Drop, Kept
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata, FeatureSpec, NormSide
from spec_lab.engine.pages import PageTable
from spec_lab.models.decoder import DecoderTarget
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.linear import DenseLinear, GatedMLP, make_linear
from spec_lab.models.mtp import MtpModule
from spec_lab.models.rope import rotary_table
from spec_lab.operators.triton_layers import TwoWays
from spec_lab.operators.triton_linear import TritonGatedMLP, dense
from spec_lab.operators.triton_set import triton_set
from tests.kernel_lab import DEVICE, LaunchedKernels, randn
from tests.tiny_checkpoints import make_tiny_target

DTYPE = torch.float16
PAGE_SIZE, MAX_POSITIONS = 4, 64
FEATURES = FeatureSpec(layer_inputs=(0, 1))


@dataclass
class Lane:
    """A paged cache of three slots for layers of these plans, and the backend that reads it."""

    backend: TritonAttention
    cache: PagedKVCache
    table: PageTable

    @classmethod
    def of(cls, plans: tuple[LayerPlan, ...]) -> Lane:
        table = PageTable(3, 40, PAGE_SIZE, DEVICE)
        for slot in range(3):
            table.assign(slot, list(range(2 + slot, 32, 3)))
        cache = PagedKVCache([cache_row(plan) for plan in plans], 32, PAGE_SIZE, DTYPE, DEVICE)
        return cls(TritonAttention(PAGE_SIZE, MAX_POSITIONS, rope_write), cache, table)

    def metadata(self, starts: list[int], num_queries: int) -> AttentionMetadata:
        first = torch.tensor(starts, device=DEVICE)
        positions = first.unsqueeze(1) + torch.arange(num_queries, device=DEVICE)
        return self.backend.build(
            positions, first + num_queries, self.table.pages[: len(starts)], max(starts) + num_queries
        )


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder, family = tmp_path_factory.mktemp("config"), request.param
    make_tiny_target(folder, family, num_hidden_layers=2)
    return read_model_config(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_target(folder, "llama", num_hidden_layers=2)
    return read_model_config(folder)


def make_target(config: ModelConfig, lane: Lane, kernels: KernelSet, narrow: bool = False) -> DecoderTarget:
    tensors = random_tensors(decoder_tensor_shapes(config), DTYPE, DEVICE, 3)
    tensors = with_narrow_products(tensors, FP8) if narrow else tensors
    return DecoderTarget(config, tensors, lane.backend, MAX_POSITIONS, kernels=kernels)


def prompt(num_requests: int, num_rows: int) -> torch.Tensor:
    return torch.randint(20, (num_requests, num_rows), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def assert_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare what was rounded to 16 bits at different places."""
    assert got.shape == expected.shape and got.isfinite().all()
    assert (got.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def selections(lane: Lane) -> dict[str, Kept]:
    live = torch.tensor([1, 5], device=DEVICE)
    return {
        "all": ALL_ROWS,
        "live": Kept(Drop.AFTER_LAYER, live),
        "after": Kept(Drop.AFTER_ATTENTION, live),
        "before": Kept(Drop.BEFORE_ATTENTION, live, lane.metadata([7, 8], 1)),
    }


def test_a_target_gives_what_it_gives_without(config: ModelConfig) -> None:
    """Prompt rows first, whose last layer writes KV alone, then a round of two requests."""
    outputs, caches = [], []
    for kernels in (TORCH_FORMS, triton_set()):
        lane = Lane.of(config.layers)
        target = make_target(config, lane, kernels)
        lane.cache.kv.zero_()
        target.forward(
            prompt(2, 6).flatten(), Pass(lane.cache, lane.metadata([0, 0], 6), Kept(Drop.EVERYTHING)), FEATURES
        )
        round_ = target.forward(prompt(2, 4).flatten(), Pass(lane.cache, lane.metadata([6, 4], 4)), FEATURES)
        assert round_.features is not None
        outputs.append([target.logits(round_.hidden), round_.features])
        caches.append(lane.cache.kv)
    for got, expected in zip(outputs[1], outputs[0], strict=True):
        assert_alike(got, expected)
    assert_alike(caches[1], caches[0])


@pytest.mark.parametrize("num_rows", [4, 66])
def test_rows_of_prompts_give_what_they_give_without(llama: ModelConfig, num_rows: int) -> None:
    """Few rows or many: all go to the library, behind norms of their own."""
    lane, outputs = Lane.of(llama.layers), []
    rows, metadata = prompt(1, num_rows).flatten(), lane.metadata([0], num_rows)
    for kernels in (TORCH_FORMS, triton_set()):
        target = make_target(llama, lane, kernels)
        with kernels.prompt_rounding.products():
            outputs.append(target.logits(target.forward(rows, Pass(lane.cache, metadata), FEATURES).hidden))
    assert_alike(outputs[1], outputs[0])


@pytest.mark.parametrize("num_rows", [10, 33])
def test_more_rows_give_what_they_give_without(llama: ModelConfig, num_rows: int) -> None:
    """20 rows have our MLP and the library's attention, 66 rows go to the library."""
    lane = Lane.of(llama.layers)
    rows, metadata = prompt(2, num_rows).flatten(), lane.metadata([0, 0], num_rows)
    outputs = [
        make_target(llama, lane, kernels)
        .forward(rows, Pass(lane.cache, metadata, Kept(Drop.AFTER_ATTENTION, last)), FEATURES)
        .hidden
        for last in [torch.tensor([num_rows - 1, 2 * num_rows - 1], device=DEVICE)]
        for kernels in (TORCH_FORMS, triton_set())
    ]
    assert_alike(outputs[1], outputs[0])


@pytest.mark.parametrize(("num_rows", "ours"), [(4, 4), (10, 4), (33, 0)])
def test_a_target_in_e4m3_gives_what_its_numbers_give(llama: ModelConfig, num_rows: int, ours: int) -> None:
    """Against the same numbers in 16 bits, by the library. 8 rows go through the fused layer, 20 through our products
    one by one, and for 66 the weights are widened."""
    lane = Lane.of(llama.layers)
    rows, metadata = prompt(2, num_rows).flatten(), lane.metadata([0, 0], num_rows)
    target = make_target(llama, lane, triton_set(), narrow=True)
    with LaunchedKernels() as launched:
        got = target.forward(rows, Pass(lane.cache, metadata), FEATURES).hidden
    assert launched.count["product"] + launched.count["project_heads"] == ours * len(llama.layers)
    assert launched.count["widen"] == (4 - ours) * len(llama.layers)
    tensors = with_narrow_products(random_tensors(decoder_tensor_shapes(llama), DTYPE, DEVICE, 3), FP8)
    wide = DecoderTarget(llama, with_wide_products(tensors, FP8, DTYPE), lane.backend, MAX_POSITIONS)
    assert_alike(got, wide.forward(rows, Pass(lane.cache, metadata), FEATURES).hidden)


def assert_rounds_are_plain(lane: Lane, target: Any) -> None:
    """Four rows of each of three requests, at once, and the first's one by one: bit-equal, with the logits."""
    starts, tokens = [9, 3, 1], prompt(3, 13)
    for slot, start in enumerate(starts):
        positions, pages = torch.arange(start, device=DEVICE).unsqueeze(0), lane.table.pages[slot : slot + 1]
        metadata = lane.backend.build(positions, torch.tensor([start], device=DEVICE), pages, start)
        target.forward(tokens[slot, :start], Pass(lane.cache, metadata, Kept(Drop.EVERYTHING)), FeatureSpec())
    rows = torch.stack([tokens[slot, start : start + 4] for slot, start in enumerate(starts)])
    verified = target.forward(rows.flatten(), Pass(lane.cache, lane.metadata(starts, 4)), FeatureSpec())
    together = target.logits(verified.hidden).view(3, 4, -1)
    for column in (0, 3):
        metadata = lane.metadata([starts[0] + column], 1)
        alone = target.forward(rows[0, column : column + 1], Pass(lane.cache, metadata), FeatureSpec())
        assert torch.equal(target.logits(alone.hidden)[0], together[0, column])


@pytest.mark.parametrize("narrow", [False, True])
def test_a_row_of_a_round_is_the_row_of_plain_decoding(config: ModelConfig, narrow: bool) -> None:
    lane = Lane.of(config.layers)
    assert_rounds_are_plain(lane, make_target(config, lane, triton_set(), narrow))


def run_head(head: Eagle3Head | MtpModule, lane: Lane, name: str) -> list[torch.Tensor]:
    """Write a prompt, run a round of two requests, and pick a token of each row that is left."""
    lane.cache.kv.zero_()
    hidden = randn(2, 6, 32, seed=2, dtype=DTYPE)
    layer = lane.cache.layers[0]
    head.forward(
        prompt(2, 6).flatten(), hidden.flatten(0, 1), Pass(layer, lane.metadata([0, 0], 6), Kept(Drop.EVERYTHING))
    )
    rows = prompt(2, 4).flatten(), hidden[:, :4].flatten(0, 1)
    out = head.forward(*rows, Pass(layer, lane.metadata([6, 4], 4), selections(lane)[name]))
    tokens, probabilities = head.greedy_with_probability(out)
    assert torch.equal(tokens, head.greedy(out))
    return [out, head.draft_logits(out), lane.cache.kv, tokens.to(DTYPE), probabilities.to(DTYPE)]


def assert_eagle3_alike(target: ModelConfig, selection: str) -> None:
    """Check that a head for this target gives with kernels what it gives without."""
    results = []
    for kernels in (TORCH_FORMS, triton_set()):
        head_config, tensors = random_eagle3(target, 16, DTYPE, DEVICE, 1)
        lane = Lane.of(head_config.layer.layers)
        weights = random_tensors(decoder_tensor_shapes(target), DTYPE, DEVICE, 3)
        shared = weights["model.embed_tokens.weight"], weights["lm_head.weight"], lane.backend, MAX_POSITIONS
        results.append(run_head(Eagle3Head(head_config, tensors, *shared, None, kernels), lane, selection))
    for got, expected in zip(*reversed(results), strict=True):
        assert_alike(got, expected)


@pytest.mark.parametrize("selection", ["all", "before", "live", "after"])
def test_an_eagle3_head_gives_what_it_gives_without(tmp_path: Path, selection: str) -> None:
    make_tiny_target(tmp_path, "llama")
    assert_eagle3_alike(read_model_config(tmp_path), selection)


@pytest.mark.parametrize("side", list(NormSide))
def test_an_mtp_module_gives_what_it_gives_without(llama: ModelConfig, side: NormSide) -> None:
    from dataclasses import replace

    results = []
    for kernels in (TORCH_FORMS, triton_set()):
        mtp, (tensors,) = random_mtp(llama, 1, DTYPE, DEVICE, 1)
        mtp = replace(mtp, recycled_hidden=side)
        plan = mtp.layer.only_layer
        lane = Lane.of((plan,))
        weights = random_tensors(decoder_tensor_shapes(llama), DTYPE, DEVICE, 3)
        rotary = rotary_table(plan.rope, plan.head_dim, MAX_POSITIONS, DTYPE, DEVICE)
        head = make_linear(weights["lm_head.weight"])
        shared = weights["model.embed_tokens.weight"], head, rotary, lane.backend, kernels
        results.append(run_head(MtpModule(mtp, tensors, *shared), lane, "after"))
    for got, expected in zip(*reversed(results), strict=True):
        assert_alike(got, expected)


def test_float32_keeps_the_librarys_products(llama: ModelConfig) -> None:
    assert not make_kernels("triton", DEVICE, torch.float32).parts
    lane = Lane.of(llama.layers)
    target = make_target(llama, lane, make_kernels("triton", DEVICE, torch.float16))
    assert all(type(layer) is TwoWays for layer in target.layers)


def test_what_is_row_invariant(llama: ModelConfig) -> None:
    plan = llama.layers[0]
    assert triton_set().is_row_invariant(plan)
    assert not triton_set(row_invariant=False).is_row_invariant(plan) and not TORCH_FORMS.is_row_invariant(plan)
    for change in ({"attention_gate": True}, {"float32_norms": True}, {"mlp_bias": True}):
        assert not triton_set().is_row_invariant(replace(plan, **change))  # type: ignore[arg-type]


def test_many_rows_of_an_mlp_are_added_to_the_stream_in_place() -> None:
    """The product that adds rounds once, where a product and a sum round twice."""
    gate_up, down = (DenseLinear(randn(*shape, seed=shape[0], dtype=DTYPE) / 4, None) for shape in ((48, 16), (16, 24)))
    mlp = GatedMLP(gate_up, down)
    stream, rows = (randn(70, 16, seed=seed, dtype=DTYPE) for seed in (1, 2))
    expected = stream + mlp(rows)
    got = TritonGatedMLP.of(mlp).add_to(stream, rows)
    assert got is stream
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_a_product_in_e4m3_is_added_as_it_is_without() -> None:
    values = randn(256, 128).to(torch.float8_e4m3fn)
    linear = make_linear(values, scales=torch.rand(256, 1, device=DEVICE) + 0.5)
    stream, rows = randn(70, 256, seed=1), randn(70, 128, seed=2)
    expected = stream + linear(rows)
    torch.testing.assert_close(dense(linear).add_to(stream, rows), expected, rtol=1e-4, atol=1e-3)
