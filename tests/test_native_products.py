"""kernels=native: models whose few rows go through the C against the same models without, and against one row alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import spec_lab
from spec_kernels.native import build
from spec_kernels.native import parts as native_parts
from spec_kernels.native.compiled import has_tiles
from spec_kernels.native.packing import Layout, pack
from spec_kernels.native.part_operators import multiply
from spec_kernels.native.parts import NativeProduct
from spec_lab.attention.native_backend import NativeAttention
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kept import Drop, Kept
from spec_lab.core.kernel_set import TORCH_FORMS, Op
from spec_lab.core.passes import Pass
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.models.draft_parts import DraftInput, LikeliestToken
from spec_lab.models.layers import AddThenNorm
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import RMSNorm
from spec_lab.operators.native_forwards import MAX_ROWS
from spec_lab.operators.native_set import NativeDecoderLayer, native_set
from tests.native_lane import FULL, HIDDEN_SIZE, MAX_POSITIONS, PAGE_SIZE, PLANS, Lane, assert_alike, tokens_of

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="needs a C compiler")


@pytest.fixture(params=[False, True], ids=["vectors", "tiles"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Have 16-bit weights multiplied by vectors, as any processor does, or by tile registers, where there are some."""
    if request.param and not has_tiles():
        pytest.skip("needs AMX, and a system that allows it")
    monkeypatch.setattr(native_parts, "has_tiles", lambda: request.param)
    return Layout.TILES if request.param else Layout.HALVES


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_target_gives_what_it_gives_without(plan: LayerPlan) -> None:
    """A prompt of more rows than the kernels take, one whose last layer writes KV alone, then rounds of two requests
    and of one, whose slot's pages hold NaN behind its end."""
    lanes = [Lane(plan, TORCH_FORMS), Lane(plan, native_set())]
    assert isinstance(lanes[1].target.layers[0], NativeDecoderLayer)
    for lane in lanes:
        lane.run([0], tokens_of(1, MAX_ROWS + 3))
        lane.run([0, 0], tokens_of(2, 21), Kept(Drop.EVERYTHING))
        lane.cache.kv[:, lane.slots(0, 21)] = float("nan")
        lane.cache.kv[:, lane.slots(1, 17)] = float("nan")
    for starts, rows in (([21, 17], 4), ([25], 1), ([26, 4], 3)):
        outputs = [lane.run(starts, tokens_of(len(starts), rows)) for lane in lanes]
        for name in ("hidden", "features"):
            assert_alike(*(getattr(output, name) for output in outputs))
        assert_alike(*(lane.target.logits(output.hidden) for lane, output in zip(lanes, outputs, strict=True)))
    assert_alike(*(lane.cache.kv.nan_to_num() for lane in lanes))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plan", [PLANS["qwen3"], PLANS["window"]], ids=["full", "window"])
def test_a_row_is_the_same_bits_whatever_stands_beside_it(plan: LayerPlan, dtype: torch.dtype) -> None:
    """In rounds of 1 to 9 rows, alone and beside another request; with 33 keys, which end inside a vector."""
    tokens = tokens_of(2, 9)
    lane = Lane(plan, native_set(), dtype)
    lane.run([0, 0], tokens_of(2, 30))
    alone = torch.cat([lane.run([30 + row], tokens[:1, row : row + 1]).hidden for row in range(9)])
    for rows in (2, 3, 4, 7, 9):
        for num_requests in (1, 2):
            hidden = lane.run([30, 30][:num_requests], tokens[:num_requests, :rows]).hidden[:rows]
            assert torch.equal(hidden, alone[:rows])
            logits = lane.target.logits(hidden)
            assert torch.equal(logits[-1:], lane.target.logits(hidden[-1:].clone()))


def test_rows_that_are_dropped_are_not_missed() -> None:
    """The three ways to drop rows inside the last layer leave what the whole layer has of the others."""
    lane = Lane(PLANS["qwen3"], native_set())
    live = torch.tensor([1, 5])
    tokens = tokens_of(2, 4)
    whole = lane.run([7, 9], tokens).hidden[live]
    before = Kept(Drop.BEFORE_ATTENTION, live, lane.metadata([8, 10], 1))
    for selection in (Kept(Drop.AFTER_ATTENTION, live), before):
        assert torch.equal(lane.run([7, 9], tokens, selection).hidden, whole)
    written = lane.slots(0, 7)[:4]
    kept = lane.cache.kv[1, written].clone()
    lane.cache.kv[1, written] = 0
    lane.run([7, 9], tokens, Kept(Drop.EVERYTHING))
    assert torch.equal(lane.cache.kv[1, written], kept)


def test_a_draft_head_body_without_a_norm_of_its_own() -> None:
    """A body takes normed rows, wider than the stream, and a residual that may be a slice."""
    lane = Lane(FULL, TORCH_FORMS)
    plain = lane.target.layers[0]
    body = replace(plain, norm=None)
    ours = native_set().get(Op.LAYER, body)
    metadata, rows = lane.metadata([3], 2), torch.randn(2, HIDDEN_SIZE)
    rotary = lane.target.rotary_tables[0].rows(metadata.positions)
    residual = torch.randn(2, 2 * HIDDEN_SIZE)[:, HIDDEN_SIZE:]
    at = Pass(lane.cache.layers[0], metadata, rotary=rotary)
    assert_alike(body(residual, at, rows), ours(residual, at, rows))
    at = replace(at, kept=Kept(Drop.EVERYTHING))
    lane.cache.kv.zero_()
    assert len(ours(residual, at, rows)) == 0
    written = lane.cache.kv.clone()
    body(residual, at, rows)
    assert_alike(lane.cache.kv, written)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (130, 7), (5, 256)])
def test_products_and_their_bytes(outputs: int, inputs: int, bits: int, path: Layout) -> None:
    """Within what sums of 256 float32 numbers in another order come to: up to 5e-5 in 12 000 tries."""
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    weight = weight.bfloat16().float() if bits == 16 else weight
    panels, layout = pack(weight, path is Layout.TILES)
    assert panels.element_size() == bits // 8 and layout == (path if bits == 16 else Layout.FLOATS)
    product = NativeProduct(weight, bias)
    for num_rows in (1, 7, 16, 21):
        rows = torch.randn(num_rows, inputs)
        out = torch.full((num_rows, outputs), float("nan"))
        multiply(out, rows, product.address)
        torch.testing.assert_close(out, F.linear(rows, weight, bias), rtol=1e-4, atol=1e-4)
    ours = native_set().get(Op.LINEAR, make_linear(weight, bias))
    assert torch.equal(ours(rows), out)
    many = torch.randn(MAX_ROWS + 1, inputs)
    torch.testing.assert_close(ours(many), F.linear(many, weight, bias), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("path")
def test_a_row_of_a_product_is_the_same_bits_among_1_to_128() -> None:
    """With outputs behind the last whole panel, and inputs behind the last whole tile."""
    product = NativeProduct(torch.randn(130, 70).bfloat16().float())
    rows = torch.randn(MAX_ROWS, 70) * torch.rand(MAX_ROWS, 1)
    alone = multiplied(product, rows[:1])
    for row in range(1, MAX_ROWS):
        alone = torch.cat((alone, multiplied(product, rows[row : row + 1])))
        assert torch.equal(multiplied(product, rows[: row + 1]), alone)


@pytest.mark.parametrize("plan", [FULL, PLANS["window"]], ids=["full", "window"])
def test_rows_in_front_of_the_caches_end_see_what_they_see_without_those_behind(plan: LayerPlan) -> None:
    """Though the request is longer by then than its pages, the scratch page with them."""
    lanes = [Lane(plan, kernels) for kernels in (TORCH_FORMS, native_set())]
    tokens = tokens_of(2, MAX_POSITIONS)
    for lane in lanes:
        lane.run([0, 0], tokens[:, :-2], Kept(Drop.EVERYTHING))
    outputs = [lane.run([MAX_POSITIONS - 2, 20], tokens[:, :9]).hidden.view(2, 9, -1) for lane in lanes]
    assert_alike(*(output[0, :2] for output in outputs))
    assert_alike(*(output[1] for output in outputs))


def multiplied(product: NativeProduct, rows: torch.Tensor) -> torch.Tensor:
    """Multiply rows between rows of NaN, which are not read, into rows between infinite ones, which stay."""
    height = 2 * 16 + len(rows)
    read = torch.full((height, product.num_inputs), float("nan"))
    out = torch.full((height, product.num_outputs), float("inf"))
    read[16:-16] = rows
    multiply(out[16:-16], read[16:-16], product.address)
    assert out[:16].isinf().all() and out[-16:].isinf().all()
    return out[16:-16]


@pytest.mark.usefixtures("path")
def test_products_are_those_of_float32_numbers() -> None:
    """Beside float64: no bit of a row is lost in front of its sum. Sums of vectors err by 5e-7, of tiles by 2e-7."""
    weight, rows = torch.randn(64, 768).bfloat16().double(), torch.rand(32, 768)
    got = multiplied(NativeProduct(weight.float()), rows).double()
    expected = F.linear(rows.double(), weight)
    assert (got - expected).norm() <= 1e-6 * expected.norm()
    one = torch.zeros(32, 768)
    one[:, 5] = rows[:, 5]
    weight = torch.randn(64, 768).sign() * 2.0 ** torch.randint(-9, 9, (64, 1))
    assert torch.equal(multiplied(NativeProduct(weight), one), F.linear(one, weight))


@pytest.mark.usefixtures("path")
def test_numbers_that_are_not_finite_or_hardly_numbers() -> None:
    """Infinity stays infinite, NaN stays one; what is below the least normal number may be 0."""
    weight = torch.tensor([[1.0, 0.5], [-2.0, 1.0], [0.0, 1.0]])
    infinite, largest, least = float("inf"), torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    cases = [[infinite, 1.0], [-infinite, infinite], [float("nan"), 1.0], [largest, 0.0]]
    rows = torch.tensor([*cases, [least, 0.0], [least / 64, least / 128]])
    expected = rows.double() @ weight.double().T
    torch.testing.assert_close(
        multiplied(NativeProduct(weight), rows), expected.float(), rtol=1e-6, atol=2 * least, equal_nan=True
    )


def test_a_system_that_refuses_tile_registers() -> None:
    """Linux does where a thread's stack for signals is too small for them; one with room is asked for again."""
    refused = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    assert refused.stdout.split() == ["0", str(int(has_tiles()))]


REFUSED = """
import ctypes
from spec_kernels.native.build import library

class Stack(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

memory = ctypes.create_string_buffer(1 << 16)
for size in (8192, len(memory)):
    stack = Stack(ctypes.addressof(memory), 0, size)
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
    print(library().native_has_tiles())
"""


def test_metadata_is_that_of_torch() -> None:
    """Inside the cache, behind its end, in front of its beginning, and of rows that see nothing."""
    backends = TorchAttention(PAGE_SIZE, MAX_POSITIONS), NativeAttention(PAGE_SIZE, MAX_POSITIONS)
    pages = torch.randperm(90)[: 3 * 25].view(3, 25)
    positions = torch.tensor([[-5, -4, -1], [0, 3, 4], [95, 100, 170]])
    for seq_lens in (torch.tensor([-3, 5, 101]), torch.tensor([0, 96, 400])):
        made = [backend.build(positions.T.contiguous().T, seq_lens, pages, 101) for backend in backends]
        ones = [backend.build(positions[:, :1], seq_lens, pages, 101) for backend in backends]
        for _ in range(2):
            for first, second in (made, ones):
                for name in ("positions", "slot_mapping", "seq_lens", "page_table"):
                    assert torch.equal(getattr(first, name), getattr(second, name)), name
                assert (first.num_queries, first.max_seq_len) == (second.num_queries, second.max_seq_len)
            for backend, one in zip(backends, ones, strict=True):
                backend.advance(one)
    for backend, one in zip(backends, ones, strict=True):
        backend.mask(one, None, torch.float32, 2)
        backend.read_slots(one)
        backend.advance(one)
    assert torch.equal(ones[0].masks[None, 2], ones[1].masks[None, 2])
    assert ones[0].read_slots is not None and torch.equal(ones[0].read_slots, ones[1].read_slots)


def test_the_likeliest_token_and_its_ties() -> None:
    weight = torch.zeros(70, 32)
    weight[[3, 66, 41]] = 1.0
    weight[2] = 2.0
    rows = torch.ones(3, 32)
    rows[1], rows[2, 4] = -rows[1], float("nan")
    token_map = torch.arange(70) * 10
    norm = RMSNorm(torch.ones(32), 1e-6)
    for token_map_or_none in (None, token_map):
        plain = LikeliestToken(norm, make_linear(weight), token_map_or_none)
        ours = native_set().get(Op.LIKELIEST, plain)
        assert ours(rows).tolist() == plain(rows).tolist()
        for got, expected in zip(ours.with_probability(rows), plain.with_probability(rows), strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)
    weight[2] = 0.0
    tied = LikeliestToken(None, make_linear(weight))
    assert native_set().get(Op.LIKELIEST, tied)(torch.ones(1, 32)).tolist() == [3]


def test_a_draft_input() -> None:
    parts = DraftInput(torch.randn(9, 40), RMSNorm(torch.randn(40), 1e-5), RMSNorm(torch.randn(40), 1e-6))
    tokens, hidden = torch.tensor([8, 0, 3]), torch.randn(3, 80)[:, :40]
    for got, expected in zip(
        native_set().get(Op.DRAFT_INPUT, parts)(tokens, hidden), parts(tokens, hidden), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_exponentials_where_they_end() -> None:
    """The activation of gates that no float32 exponential holds, and NaN, which stays one."""
    gates = torch.tensor([-1e4, -100.0, -88.5, -87.2, -20.0, -1e-3, 0.0, 1e-3, 5.0, 88.5, 200.0, float("nan")])
    lane = Lane(replace(FULL, intermediate_size=16), native_set())
    plain = lane.target.layers[0]._many
    identity = torch.eye(16, HIDDEN_SIZE)
    weight = torch.cat((identity, torch.zeros(16, HIDDEN_SIZE)))
    mlp = plain.finish.part
    mlp.gate_up, mlp.down = make_linear(weight, torch.ones(32) * torch.arange(32).ge(16)), make_linear(identity.T)
    for gate in gates:
        stream = torch.zeros(1, HIDDEN_SIZE)
        stream[0, 0] = 1.0
        norm = RMSNorm(torch.full((HIDDEN_SIZE,), float(gate) / HIDDEN_SIZE**0.5), 0.0)
        body = replace(plain, norm=None, close=AddThenNorm(plain.close.product, norm))
        mlp_only = native_set().get(Op.LAYER, body)
        metadata = lane.metadata([0], 1)
        rotary = lane.target.rotary_tables[0].rows(metadata.positions)
        rows = torch.zeros(1, HIDDEN_SIZE)
        place = stream, Pass(lane.cache.layers[0], metadata, rotary=rotary), rows
        lane.cache.kv.zero_()
        torch.testing.assert_close(mlp_only(*place), body(*place), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_draft_model_has_these_layers_too() -> None:
    composed = spec_lab.compose(["device=cpu", "drafter=draft_model", "workload.limit=1", "max_new_tokens=2"])
    drafter = load_lab(composed.config).engines[MAIN].parts.drafter
    assert isinstance(drafter.model.layers[0], NativeDecoderLayer)


@pytest.mark.parametrize("overrides", [(), ("graph=round", "batch_size=3")], ids=["eager", "tape"])
def test_a_run_has_the_tokens_of_plain_decoding_to_the_bit(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The shipped pair, drafting and pruned: by plain decoding beside it, by the teacher's judgement, and by torch."""
    shared = [
        *("device=cpu", "prune=catchup", "repeats=1", "warmup_requests=0", "profile_rounds=0", "workload.limit=2"),
        *("max_new_tokens=12", f"output_dir={tmp_path}", *overrides),
    ]
    found = {}
    for kernels, references in (("native", "[plain]"), ("torch", "[]") if overrides else ("native", "[]")):
        composed = spec_lab.compose([f"kernels={kernels}", f"references={references}", *shared])
        run = spec_lab.run(composed)
        assert run.run.row_invariant is (kernels == "native")
        divergence = run.run.under("divergence")
        assert (divergence["near_ties"], divergence["bugs"]) == (0, 0)
        found[kernels, references] = [request.output_ids for request in run.requests]
    assert len({str(outputs) for outputs in found.values()}) == 1
