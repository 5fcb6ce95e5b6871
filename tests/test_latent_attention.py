"""Latent attention over the paged cache against transformers' DeepSeek-V3 attention, which unfolds keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.latent_sizes import LatentSizes, latent_tensor_shapes
from spec_lab.core.kept import ALL_ROWS, Kept
from spec_lab.core.kv_cache import NULL_PAGE, LayerCache
from spec_lab.core.passes import Pass
from spec_lab.core.pruning import Drop
from spec_lab.core.types import AttentionMetadata
from spec_lab.engine.pages import PageTable
from spec_lab.models.latent import LatentAttention, build_latent_attention
from spec_lab.models.rope import RotaryTable
from tests.tiny_checkpoints import randomize, refused
from tests.tiny_latent import SIZES

LENGTH, PAGE_SIZE, HIDDEN, HEADS = 100, 4, 32, 4
MSCALE = 1.2079441541679836  # 0.1 * ln(8) + 1
KINDS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "no_narrow_query": {"q_lora_rank": None},
    "wide_values": {"qk_nope_head_dim": 10, "v_head_dim": 14},
    "two_halves": {"rope_interleave": False},
    "biases": {"attention_bias": True},
    "plain_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


@dataclass
class Oracle:
    """transformers' attention, and what it makes of random rows: its output, and its cache of latent rows."""

    module: Any
    rows: torch.Tensor
    expected: torch.Tensor
    cached: torch.Tensor
    table: RotaryTable
    sizes: LatentSizes

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.module.state_dict().items()}


@torch.inference_mode()
def make_oracle(kind: str) -> Oracle:
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    options = SIZES | KINDS[kind]
    config = DeepseekV3Config(**options)
    config._attn_implementation = "eager"
    module = modeling.DeepseekV3Attention(config, 0).eval()
    randomize(module)
    rows = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    cos, sin = modeling.DeepseekV3RotaryEmbedding(config)(rows, torch.arange(LENGTH)[None])
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    cache = DynamicCache()
    expected = module(rows[None], (cos, sin), mask, past_key_values=cache)[0][0]
    cached = torch.cat((cache.layers[0].keys, cache.layers[0].values), dim=-1)[0, 0]
    sizes = LatentSizes(
        q_lora_rank=options["q_lora_rank"],
        kv_lora_rank=options["kv_lora_rank"],
        qk_nope_head_dim=options["qk_nope_head_dim"],
        qk_rope_head_dim=options["qk_rope_head_dim"],
        v_head_dim=options["v_head_dim"],
        interleaved=options.get("rope_interleave", True),
        bias=options.get("attention_bias", False),
        mscale=1.0 if kind == "plain_rope" else MSCALE,
    )
    return Oracle(module, rows, expected, cached, RotaryTable(cos[0], sin[0]), sizes)


@dataclass
class Lane:
    """Latent attention with a cache for some requests, all NaN where nothing was written."""

    attention: LatentAttention
    backend: TorchAttention
    cache: LayerCache
    pages: PageTable
    rotary: RotaryTable

    def run(self, rows: torch.Tensor, starts: list[int], kept: Kept | None = None, first_slot: int = 0) -> torch.Tensor:
        """Run rows [batch, num_queries, HIDDEN] at `starts`, of the slots from `first_slot` on."""
        metadata = self.metadata(rows.shape[1], starts, first_slot)
        at = self.rotary.turning(Pass(self.cache, metadata, kept or ALL_ROWS))
        if kept is not None and kept.is_empty:
            self.attention.write(rows.flatten(0, 1), at)
            return rows.new_empty(0, HIDDEN)
        return self.attention.o(self.attention(rows.flatten(0, 1), at))

    def metadata(self, num_queries: int, starts: list[int], first_slot: int = 0) -> AttentionMetadata:
        first = torch.tensor(starts)
        pages = self.pages.pages[first_slot : first_slot + len(starts)]
        positions = first.unsqueeze(1) + torch.arange(num_queries)
        return self.backend.build(positions, first + num_queries, pages, max(starts) + num_queries)

    def cached(self, length: int, slot: int = 0) -> torch.Tensor:
        positions = torch.arange(length)
        pages = self.pages.pages[slot][positions // PAGE_SIZE]
        return self.cache.kv[pages * PAGE_SIZE + positions % PAGE_SIZE]


def make_lane(
    oracle: Oracle, sizes: LatentSizes | None = None, tensors: dict[str, torch.Tensor] | None = None, slots: int = 1
) -> Lane:
    sizes = sizes or oracle.sizes
    backend = TorchAttention(PAGE_SIZE, LENGTH)
    named = {f"self_attn.{name}": tensor for name, tensor in (tensors or oracle.tensors()).items()}
    attention = build_latent_attention(sizes, HEADS, 1e-6, named, "self_attn.", backend)
    pages = PageTable(slots, LENGTH, PAGE_SIZE, torch.device("cpu"))
    num_pages = 2 + slots * LENGTH // PAGE_SIZE
    for slot in range(slots):
        pages.assign(slot, list(range(2 + slot, num_pages, slots))[::-1])
    kv = torch.zeros(num_pages * PAGE_SIZE, sizes.row_width)
    kv[(NULL_PAGE + 1) * PAGE_SIZE :] = float("nan")
    return Lane(attention, backend, LayerCache(kv), pages, oracle.table)


@torch.inference_mode()
def run_in_parts(lane: Lane, rows: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    out, start = [], 0
    for count in parts:
        out.append(lane.run(rows[None, start : start + count], [start]))
        start += count
    assert start == LENGTH
    return torch.cat(out)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return make_oracle("yarn")


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_cache_rows_equal_transformers(kind: str) -> None:
    oracle = make_oracle(kind)
    shapes = latent_tensor_shapes(oracle.sizes, HEADS, HIDDEN, HIDDEN)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in oracle.tensors().items()}
    for parts in ((40, 1, 4, 55), (100,)):
        lane = make_lane(oracle)
        torch.testing.assert_close(run_in_parts(lane, oracle.rows, parts), oracle.expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(lane.cached(LENGTH), oracle.cached, rtol=0, atol=2e-5)


def halves(kv_b: torch.Tensor, sizes: LatentSizes) -> torch.Tensor:
    """What the reader takes for keys and values of each head, if the file had all keys before all values."""
    keys, values = kv_b.split((HEADS * sizes.qk_nope_head_dim, HEADS * sizes.v_head_dim))
    both = (keys.unflatten(0, (HEADS, -1)), values.unflatten(0, (HEADS, -1)))
    return torch.cat(both, dim=1).flatten(0, 1)


def norm_the_whole_row(lane: Lane) -> None:
    attention = lane.attention
    row, norm = attention.row, attention.norm

    def normed(rows: torch.Tensor) -> torch.Tensor:
        whole = row(rows)
        return whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + norm.eps)

    attention.row = normed
    attention.norm = lambda latent: latent * norm.weight  # type: ignore[assignment]


SIZE_MISTAKES: dict[str, Callable[[LatentSizes], LatentSizes]] = {
    "scale_of_the_cache_row": lambda sizes: replace(
        sizes, mscale=sizes.mscale * (sizes.query_width / sizes.row_width) ** 0.25
    ),
    "no_mscale": lambda sizes: replace(sizes, mscale=1.0),
    "mscale_not_squared": lambda sizes: replace(sizes, mscale=sizes.mscale**0.5),
    "rope_not_interleaved": lambda sizes: replace(sizes, interleaved=False),
}


@pytest.mark.parametrize("mistake", [*SIZE_MISTAKES, "halves", "norm_of_the_whole_row", "rotated_rows_first"])
def test_each_known_mistake_shows(oracle: Oracle, mistake: str) -> None:
    """Position 0 sees one key, and so no mistake in the scores."""
    sizes, tensors = oracle.sizes, oracle.tensors()
    if mistake in SIZE_MISTAKES:
        lane = make_lane(oracle, SIZE_MISTAKES[mistake](sizes))
    elif mistake == "halves":
        lane = make_lane(oracle, tensors=tensors | {"kv_b_proj.weight": halves(tensors["kv_b_proj.weight"], sizes)})
    elif mistake == "norm_of_the_whole_row":
        lane = make_lane(oracle)
        norm_the_whole_row(lane)
    else:
        heads = tensors["q_b_proj.weight"].unflatten(0, (HEADS, -1)).roll(sizes.qk_rope_head_dim, dims=1)
        lane = make_lane(oracle, tensors=tensors | {"q_b_proj.weight": heads.flatten(0, 1)})
    difference = (run_in_parts(lane, oracle.rows, (40, 1, 4, 55)) - oracle.expected).abs().amax(dim=1)
    assert difference[1:40].median() > 1e-3, "unfolded"
    assert difference[40:45].median() > 1e-3, "absorbed"


def test_few_rows_are_absorbed_and_a_long_chunk_is_unfolded(oracle: Oracle) -> None:
    """The parts above take both ways; with DeepSeek-V3's sizes the border lies at 170 rows of a long context."""
    cheaper = oracle.sizes.unfolding_is_cheaper
    assert [cheaper(*case) for case in ((40, 40), (1, 41), (4, 45), (55, 100))] == [True, False, False, True]
    v3 = LatentSizes(1536, 512, 128, 64, 128)
    assert not v3.unfolding_is_cheaper(160, 100_000) and v3.unfolding_is_cheaper(180, 100_000)
    assert not v3.unfolding_is_cheaper(16, 64) and v3.unfolding_is_cheaper(16, 16)


def test_the_scale_is_that_of_the_width_as_trained(oracle: Oracle) -> None:
    assert oracle.sizes.scale == pytest.approx(oracle.module.scaling, rel=1e-6)
    assert oracle.sizes.scale != pytest.approx(oracle.sizes.row_width**-0.5, rel=0.1)


NUM_ROWS, STARTS, LIVE = 4, [9, 2, 0], [0, 3, 2]
LIVE_ROWS = torch.tensor([NUM_ROWS * request + live for request, live in enumerate(LIVE)])
SELECTIONS: dict[str, Callable[[Lane], Kept]] = {
    "all_rows": lambda lane: Kept(Drop.AFTER_LAYER, LIVE_ROWS),
    "after_attention": lambda lane: Kept(Drop.AFTER_ATTENTION, LIVE_ROWS),
    "before_attention": lambda lane: Kept(
        Drop.BEFORE_ATTENTION,
        LIVE_ROWS,
        lane.metadata(1, [start + live for start, live in zip(STARTS, LIVE, strict=True)]),
    ),
    "no_rows": lambda lane: Kept(Drop.EVERYTHING),
}


@dataclass
class Counter:
    """A product that notes how many rows it gets."""

    product: Any
    counts: list[int]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.counts.append(len(rows))
        return self.product(rows)  # type: ignore[no-any-return]


@dataclass
class PoisonedTail:
    """Fills the slots of rejected rows with NaN once the catch-up has written them."""

    backend: Any
    rejected: torch.Tensor | None

    def write(self, cache: LayerCache, metadata: AttentionMetadata, rows: torch.Tensor) -> None:
        self.backend.write(cache, metadata, rows)
        if self.rejected is not None:
            cache.kv[metadata.slot_mapping[self.rejected]] = float("nan")

    def attend(self, *arguments: Any) -> torch.Tensor:
        out: torch.Tensor = self.backend.attend(*arguments)
        return out


@dataclass
class Selected:
    live: torch.Tensor
    caches: list[torch.Tensor]
    rows: tuple[int, ...]


@torch.inference_mode()
def run_selected(oracle: Oracle, name: str, poison: bool = False) -> Selected:
    """Prompts of ragged lengths, for their latent rows only; then a window of N rows after each, in one forward."""
    lane = make_lane(oracle, slots=3)
    for slot, start in enumerate(STARTS):
        if start:
            lane.run(oracle.rows[None, 30 * slot : 30 * slot + start], [0], Kept(Drop.EVERYTHING), slot)
    counts: dict[str, list[int]] = {"query": [], "o": []}
    for product, noted in counts.items():
        setattr(lane.attention, product, Counter(getattr(lane.attention, product), noted))
    rejected = torch.arange(NUM_ROWS) > torch.tensor(LIVE).unsqueeze(1)
    lane.attention.backend = PoisonedTail(lane.attention.backend, rejected.flatten() if poison else None)
    window = torch.stack([oracle.rows[30 * slot + start :][:NUM_ROWS] for slot, start in enumerate(STARTS)])
    kept = SELECTIONS[name](lane)
    out = kept.live(lane.run(window, STARTS, kept))
    caches = [lane.cached(start + NUM_ROWS, slot) for slot, start in enumerate(STARTS)]
    return Selected(out, caches, tuple(sum(noted) for noted in counts.values()))


def test_dropped_rows_write_their_latent_row_and_no_more(oracle: Oracle) -> None:
    """Cache bit-equal, the live rows' output close, and only they enter what pruning leaves out."""
    everything = run_selected(oracle, "all_rows")
    rows = {name: run_selected(oracle, name) for name in SELECTIONS}
    for name, selected in rows.items():
        for ours, theirs in zip(selected.caches, everything.caches, strict=True):
            assert ours.isfinite().all() and torch.equal(ours, theirs), name
        if name != "no_rows":
            torch.testing.assert_close(selected.live, everything.live, rtol=0, atol=1e-5)
    assert {name: selected.rows for name, selected in rows.items()} == {
        "all_rows": (12, 12),
        "after_attention": (12, 3),
        "before_attention": (3, 3),
        "no_rows": (0, 0),
    }


def test_the_live_query_does_not_see_the_rejected_rows(oracle: Oracle) -> None:
    clean, poisoned = (run_selected(oracle, "before_attention", poison) for poison in (False, True))
    assert not all(rows.isfinite().all() for rows in poisoned.caches), "the poison was there"
    assert torch.equal(clean.live, poisoned.live)


@torch.inference_mode()
def test_the_next_round_writes_over_rejected_rows(oracle: Oracle) -> None:
    """Four rows with wrong inputs, NaN in their slots, then the right ones from the position after the first."""
    lane = make_lane(oracle)
    lane.run(oracle.rows[None, :10], [0])
    lane.run(torch.cat((oracle.rows[None, 10:11], oracle.rows[None, 50:53]), dim=1), [10])
    lane.cache.kv[lane.metadata(3, [11]).slot_mapping] = float("nan")
    out = lane.run(oracle.rows[None, 11:15], [11])
    torch.testing.assert_close(out, oracle.expected[11:15], rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_window_hides_older_rows(oracle: Oracle) -> None:
    """As the attention of an EAGLE-3 head may have one: a query of 100 rows past its window sees none of the first."""
    outs = []
    for first in (oracle.rows[:1], oracle.rows[1:2]):
        lane = make_lane(oracle)
        lane.attention.window = 6
        outs.append(run_in_parts(lane, torch.cat((first, oracle.rows[1:])), (100,)))
    assert torch.equal(outs[0][6:], outs[1][6:]) and not torch.equal(outs[0][5], outs[1][5])


def test_a_backend_without_latent_attention_is_refused(oracle: Oracle) -> None:
    backend = TorchAttention(PAGE_SIZE, LENGTH)
    backend.latent = None
    named = {f"self_attn.{name}": tensor for name, tensor in oracle.tensors().items()}
    with refused("latent attention", "attention=torch"):
        build_latent_attention(oracle.sizes, HEADS, 1e-6, named, "self_attn.", backend)
