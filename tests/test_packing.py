"""Prompt passes of several requests in one forward: they leave what one request at a time leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.config.choices import Dtype, KernelsChoice, Rollback
from spec_lab.config.run import RecurrentConfig, Run, SamplingConfig
from spec_lab.core.prompts import PromptRounding, PromptSpan
from spec_lab.core.ragged import build_metadata
from spec_lab.core.types import Request, Sequence
from spec_lab.engine.engine import Engine
from spec_lab.options.acceptance.lossless import Rejection
from spec_lab.options.drafters.weights import WeightsConfig
from spec_lab.options.graphs import RoundGraph
from tests.covering import each_value
from tests.engine_state import find_tensors
from tests.fake_target import ScriptedDrafter, make_fake_engine
from tests.lab import make_config, make_engine, part
from tests.lossless_cases import KNOBS, TARGETS, TRAINED, TREES
from tests.taught_pairs import teach_drafters
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_gemma4 import make_tiny_gemma4
from tests.tiny_hybrid import make_tiny_hybrid
from tests.tiny_latent import make_latent_target

CHUNK, PAGE = 8, 4
LENGTHS = (1, 21, 2, 8, 9, 16, 24, 8)
"""Shorter than K, whole chunks and pages, a token more, and two that are alike."""


def requests_of(lengths: tuple[int, ...] = LENGTHS, max_new_tokens: int = 8) -> list[Request]:
    return [
        Request(f"r{n}", "x", tuple(3 + (7 * n + 11 * i) % 57 for i in range(length)), max_new_tokens)
        for n, length in enumerate(lengths)
    ]


def sequences_of(requests: list[Request], engine: Engine) -> list[Sequence]:
    """Admit all requests, and run their prompts to the end, as the engine does."""
    parts = engine.parts
    engine.scheduler.submit(requests)
    sequences = engine.scheduler.admit(0.0)
    assert len(sequences) == len(requests)
    with torch.inference_mode():
        for sequence in sequences:
            parts.slots.clear(sequence.slot)
            parts.slots.table.assign(sequence.slot, sequence.pages)
            parts.rule.admit(sequence.slot, sequence.request)
            parts.drafter.admit(sequence.slot, sequence.request)
        while prefilling := [s for s in sequences if s.is_prefilling]:
            for pack in engine.prompt_pass.packs(prefilling):
                engine.prompt_pass.run(pack)
    return sequences


def live_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Every tensor of cache, slots, rule and drafter, without reserved pages and the scratch slot."""
    num_slots, num_positions = engine.scheduler.num_slots, engine.parts.cache.num_pages * PAGE
    found = {}
    for path, tensor in find_tensors(engine).items():
        if num_positions in tensor.shape:
            found[path] = tensor.narrow(tensor.shape.index(num_positions), 2 * PAGE, num_positions - 2 * PAGE)
        elif tensor.shape[:1] == (num_slots + 1,):
            found[path] = tensor[:num_slots]
    return found


def check_packed_alike(config: Run, budget: int | None = 2048, tolerance: float = 1e-5) -> None:
    """Compare with one request at a time: the tokens and drafts in the slots, and all that later rounds read."""
    config.batch_size = len(LENGTHS)
    requests = requests_of()
    cache = replace(config.cache, prefill_chunk=CHUNK, page_size=PAGE)
    engines = [
        make_engine(replace(config, cache=replace(cache, prefill_tokens=tokens)), requests) for tokens in (None, budget)
    ]
    alone, packed = (sequences_of(requests, engine) for engine in engines)
    assert [s.tokens for s in packed] == [s.tokens for s in alone]
    expected, found = (live_state(engine) for engine in engines)
    compare(expected, found, tolerance)


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], tolerance: float) -> None:
    assert expected.keys() == found.keys() and any(path.startswith("cache") for path in found)
    for path, tensor in expected.items():
        atol = tolerance if tensor.is_floating_point() else 0
        torch.testing.assert_close(found[path], tensor, rtol=0, atol=atol, msg=lambda text, p=path: f"{p}: {text}")


class Weights:
    """A target with a sliding window, and a taught drafter of each kind."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "target"
        make_tiny_target(self.target, vocab_size=96, **TARGETS["qwen2_sliding"])
        self.drafters = teach_drafters(self.target, folder)

    def config(self, drafter: str, prune: str, **changes: Any) -> Run:
        path = self.drafters.get(drafter, self.target)
        return make_config((self.target, path), drafter, prune=prune, options=KNOBS.get(drafter, {}), **changes)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(("drafter", "prune"), each_value([*TRAINED, "ngram", "random", "none"], ["catchup", "none"]))
def test_a_pack_leaves_what_one_prompt_at_a_time_leaves(weights: Weights, drafter: str, prune: str) -> None:
    """Drafts, windows and KV of target and drafter, for prompts of all lengths in one pack."""
    check_packed_alike(weights.config(drafter, prune))


def test_sampled_first_tokens_are_those_of_their_requests(weights: Weights) -> None:
    """The noise of a first token is of its request and its prompt's length, whatever stands beside it."""
    config = weights.config("ngram", "none")
    config.acceptance, config.sampling = Rejection(method="one_hot"), SamplingConfig(temperature=0.8)
    check_packed_alike(config)


FAMILIES = ["gemma4", "latent", "checkpoints", "replay"]
CAPTURED = ["eagle3", "mtp_eagle", "frozen_kv", "none"]


@pytest.mark.parametrize(("drafter", "prune"), [("eagle3", "catchup"), ("frozen_kv", "none")])
def test_a_captured_prompt_leaves_what_an_eager_one_leaves(weights: Weights, drafter: str, prune: str) -> None:
    """In every number of rows that is captured, and for prompts of several chunks, which are not."""
    check_captured_alike(weights.config(drafter, prune))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("drafter", CAPTURED)
def test_a_captured_prompt_on_a_gpu(weights: Weights, drafter: str, attention: str) -> None:
    parts = {"attention": part("attention", attention), "kernels": KernelsChoice(attention)}
    config = replace(weights.config(drafter, "catchup"), device="cuda", dtype=Dtype.float32, **parts)
    check_captured_alike(config, tolerance=2e-4)


def check_captured_alike(config: Run, tolerance: float = 1e-5) -> None:
    """Compare with eager prompts, one at a time: the drafts in the slots, KV, and that scratch has nothing left."""
    requests = requests_of((1, 3, 16, 17, 5, 24, 25, 60))
    cache = replace(config.cache, prefill_chunk=24, page_size=PAGE, prefill_tokens=None)
    config = replace(config, batch_size=len(requests), cache=cache)
    eager, captured = (
        make_engine(replace(config, graph=RoundGraph(prompts=prompts)), requests) for prompts in (False, True)
    )
    captured.prompt_pass.prepare()
    forwards: list[int] = []
    forward = captured.parts.target.forward
    captured.parts.target.forward = lambda *rows: (forwards.append(len(rows[0])), forward(*rows))[1]  # type: ignore[method-assign]
    expected, found = (sequences_of(requests, engine) for engine in (eager, captured))
    assert forwards == [24, 24, 1, 24, 12], "the chunks of two prompts, all others are replayed"
    assert [s.tokens for s in found] == [s.tokens for s in expected]
    slots = captured.parts.slots
    assert not slots.kv_lens[slots.table.scratch_slot] and not slots.input_ids[slots.table.scratch_slot].any()
    compare(live_state(eager), live_state(captured), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("drafter", TRAINED)
def test_a_pack_on_a_gpu(weights: Weights, drafter: str, attention: str) -> None:
    """Products of more rows round otherwise there, in float32 too."""
    parts = {"attention": part("attention", attention), "kernels": KernelsChoice(attention)}
    config = replace(weights.config(drafter, "catchup"), device="cuda", dtype=Dtype.float32, **parts)
    check_packed_alike(config, tolerance=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [*CAPTURED, "draft_model"])
def test_a_prompt_in_a_pack_has_the_bits_of_the_prompt_alone(weights: Weights, drafter: str) -> None:
    """In bfloat16: KV of target and drafter, windows and drafts, of prompts of 1 to 24 rows in one pack."""
    check_packed_alike(in_triton(weights.config(drafter, "catchup")), tolerance=0.0)


WIDER = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
"""A target whose products take other kernels of the library for 1, 100 and 1500 rows."""
WIDER_LENGTHS = (1, 17, 37, 56, 64, 115, 300, 475, 512, 700)


def wider_config(folder: Path, prune: str) -> Run:
    sizes = {**WIDER, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 2048, "max_position_embeddings": 1024}
    make_tiny_target(folder, "llama", **sizes)
    config = in_triton(make_config((folder, folder), "ngram", prune=prune, batch_size=len(WIDER_LENGTHS)))
    return replace(config, cache=replace(config.cache, prefill_chunk=512, page_size=PAGE))


@pytest.mark.gpu
def test_so_has_one_of_a_wider_target(tmp_path: Path) -> None:
    config, requests = wider_config(tmp_path, "prefill"), requests_of(WIDER_LENGTHS)
    engines = [
        make_engine(replace(config, cache=replace(config.cache, prefill_tokens=tokens)), requests)
        for tokens in (None, 600, 8192)
    ]
    engines.append(make_engine(replace(config, graph=RoundGraph(prompts=True)), requests))
    expected, *found = [(sequences_of(requests, engine), live_state(engine))[1] for engine in engines]
    for state in found:
        compare(expected, state, tolerance=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", CAPTURED)
def test_a_captured_prompt_has_its_own_bits(weights: Weights, drafter: str) -> None:
    """In bfloat16, one at a time: KV of target and drafter, windows and drafts."""
    requests = requests_of((1, 60, 128, 129, 300, 33, 40))
    config = in_triton(weights.config(drafter, "catchup", batch_size=len(requests)))
    config = replace(config, cache=replace(config.cache, prefill_chunk=512, page_size=PAGE, prefill_tokens=1))
    engines = [make_engine(replace(config, graph=RoundGraph(prompts=is_on)), requests) for is_on in (False, True)]
    expected, found = [(sequences_of(requests, engine), live_state(engine))[1] for engine in engines]
    compare(expected, found, tolerance=0.0)


@pytest.mark.gpu
def test_the_last_row_of_a_prompt_has_its_bits_whether_the_others_are_kept(tmp_path: Path) -> None:
    """In the last layer and in the head, which compute one row of a prompt, or as many as it has."""
    lengths = WIDER_LENGTHS[:-1]
    requests, found = requests_of(lengths), []
    for prune, budget in (("prefill", 1), ("none", 1), ("prefill", 8192)):
        config = wider_config(tmp_path, prune)
        engine = make_engine(replace(config, cache=replace(config.cache, prefill_tokens=budget)), requests)
        kept = keep_logits(engine)
        sequences_of(requests, engine)
        if prune == "none":
            kept = [logits[length - 1 : length] for logits, length in zip(kept, lengths, strict=True)]
        found.append(torch.cat(kept))
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def keep_logits(engine: Engine) -> list[torch.Tensor]:
    """Return a list into which go the [rows, vocab] logits of each forward of the target."""
    kept, own = [], engine.parts.target.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(own(hidden).clone())
        return kept[-1]

    engine.parts.target.logits = logits
    return kept


def in_triton(config: Run) -> Run:
    """Return the run on a GPU, in bfloat16."""
    parts = {"attention": part("attention", "triton"), "kernels": KernelsChoice.triton}
    return replace(config, device="cuda", dtype=Dtype.bfloat16, **parts)


@pytest.mark.parametrize(
    ("drafter", "prune"), each_value(["eagle3", "mtp_vanilla", "draft_model", "dflash"], ["catchup", "none"])
)
def test_rows_that_fill_a_forward_up_leave_nothing(weights: Weights, drafter: str, prune: str) -> None:
    """Whatever stands in a forward that has too few rows, and of whatever prompts they are."""
    check_filled_alike(weights.config(drafter, prune, batch_size=len(LENGTHS)))


def test_so_do_those_of_layers_that_share_kv(tmp_path: Path) -> None:
    """Of which a last row attends among the others in the layer that writes last, and alone behind it."""
    make_tiny_gemma4(tmp_path, "e2b")
    check_filled_alike(make_config((tmp_path, tmp_path), "none", prune="prefill", batch_size=len(LENGTHS)))


def check_filled_alike(config: Run) -> None:
    requests = requests_of()
    cache = replace(config.cache, prefill_chunk=CHUNK, page_size=PAGE, prefill_tokens=17)
    plain, filled = (make_engine(replace(config, cache=cache), requests) for _ in range(2))
    filled.prompt_pass.rounding = PromptRounding(least_rows=20)
    expected, found = (sequences_of(requests, engine) for engine in (plain, filled))
    assert [s.tokens for s in found] == [s.tokens for s in expected]
    compare(live_state(plain), live_state(filled), tolerance=1e-5)


def test_long_chunks_attend_alone() -> None:
    """They are one even batch each, since a backend may have another kernel for one chunk than for two."""
    spans = [PromptSpan(slot, start, start + 4096, False) for start, slot in ((0, 0), (0, 1), (4096, 2), (4096, 3))]
    short = [PromptSpan(slot, 0, 4095, False) for slot in (4, 5)]
    metadata = build_metadata(TorchAttention(PAGE, 8192), [*spans, *short], torch.zeros(6, 2049, dtype=torch.int64))
    assert [batch.seq_lens.tolist() for batch in metadata.batches] == [[4096]] * 2 + [[8192]] * 2 + [[4095] * 2]


@pytest.mark.parametrize("drafter", ["eagle3", "frozen_kv"])
def test_trees_begin_alike(weights: Weights, drafter: str) -> None:
    config = weights.config(drafter, "catchup", num_draft_tokens=3, tree=TREES["dynamic"])
    check_packed_alike(config)


def test_offers_begin_alike(weights: Weights) -> None:
    """Where requests may offer fewer drafts, how many wait in the slots is noted for all of a pack."""
    config = weights.config("eagle3", "catchup")
    assert isinstance(config.drafter, WeightsConfig)
    config.drafter.plan = "given"
    check_packed_alike(config)


@pytest.mark.parametrize(
    ("family", "prune"), each_value(["gemma4", "latent", "checkpoints", "replay"], ["prefill", "none"])
)
def test_families_whose_layers_differ(family: str, prune: str, tmp_path: Path) -> None:
    """Layers that share KV, latent rows, which a few rows absorb and many unfold, and states by slot."""
    changes: dict[str, Any] = {}
    if family == "gemma4":
        make_tiny_gemma4(tmp_path, "e2b")
    elif family == "latent":
        make_latent_target(tmp_path)
    else:
        make_tiny_hybrid(tmp_path)
        changes["recurrent"] = RecurrentConfig(rollback=Rollback(family))
    check_packed_alike(make_config((tmp_path, tmp_path), "none", prune=prune, **changes))


def test_which_prompts_share_a_forward() -> None:
    engine, _ = make_fake_engine(lambda target: ScriptedDrafter(3, target, [0]), prefill_chunk=8, prefill_tokens=20)
    sequences = [Sequence(request, n, [], 0.0, []) for n, request in enumerate(requests_of((8, 8, 4, 1, 40, 9, 20)))]

    def lengths(prefill_tokens: int | None) -> list[list[int]]:
        engine.prompt_pass.pack_size = prefill_tokens
        return [[len(s.request.prompt_ids) for s in pack] for pack in engine.prompt_pass.packs(sequences)]

    assert lengths(20) == [[8, 8, 4], [1, 40, 9], [20]], "in their order, as many next chunks as fit"
    assert lengths(7) == [[8], [8], [4, 1], [40], [9], [20]], "a chunk that is longer runs alone"
    assert lengths(None) == [[length] for length in (8, 8, 4, 1, 40, 9, 20)]
    assert lengths(2048) == [[8, 8, 4, 1, 40, 9, 20]]


@pytest.mark.parametrize("budget", [1, 9, 2048])
@pytest.mark.parametrize("prefill", ["all_rows", "last_row"])
def test_requests_that_end_with_their_prompts(budget: int, prefill: str) -> None:
    """A first token that ends the text, limits of one token, slots reused, pages of other lengths: the tokens are those
    of plain Python."""
    engine, target = make_fake_engine(
        lambda target: ScriptedDrafter(3, target, [3, 0, 1]), prefill_chunk=8, prefill_tokens=budget, prefill=prefill
    )
    prompts = [request.prompt_ids for request in requests_of((9, 3, 8, 21, 1, 16, 2, 5, 13, 30))]
    requests = [Request(f"r{n}", "x", prompt, 1 if n % 3 == 0 else 9) for n, prompt in enumerate(prompts)]
    ends_at_once = next(
        Request("eos", "x", prompt, 9)
        for prompt in ((3 + n % 50, 4 + n // 50) for n in range(2000))
        if target.continuation(prompt, 1)[0] in target.eos_token_ids
    )
    requests[1:1] = [ends_at_once]
    result = engine.generate(requests)
    assert [record.output_ids for record in result.requests] == [target.expected(request) for request in requests]
    assert len(result.requests[1].output_ids) == 1
    assert not engine.parts.slots.kv_lens[engine.parts.slots.table.scratch_slot]


def test_what_a_forward_took_is_shared_out_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of requests add up to the times of forwards, and rows are counted for whom they were computed."""
    engine, _ = make_fake_engine(lambda target: ScriptedDrafter(3, target, [0]), prefill_chunk=8)
    clock = iter(range(10**6))
    monkeypatch.setattr("spec_lab.engine.engine.perf_counter", lambda: float(next(clock)))
    run = engine.prompt_pass.run
    seen: list[int] = []
    monkeypatch.setattr(engine.prompt_pass, "run", lambda pack: (seen.append(len(list(pack))), run(pack))[1])
    result = engine.generate(requests_of((6, 8, 10), max_new_tokens=1))
    assert seen == [3, 1] and result.num_prompt_forwards == 2
    by_request = {record.request_id: record for record in result.prefills}
    assert [by_request[f"r{n}"].seconds for n in range(3)] == pytest.approx([6 / 22, 8 / 22, 8 / 22 + 1.0])
    assert [by_request[f"r{n}"].num_chunks for n in range(3)] == [1, 1, 2]
    assert [by_request[f"r{n}"].rows.prefill_logits for n in range(3)] == [1, 1, 1]
