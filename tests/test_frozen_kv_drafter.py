"""The frozen-KV drafter in the engine, against a model that recomputes everything from the token list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.kv_cache import NULL_PAGE, cache_slots
from spec_lab.core.types import AttentionMetadata, Request, VerifiedRound
from spec_lab.drafters.frozen_kv import FrozenKVDrafter, FrozenState
from spec_lab.engine.drafts import collect_drafts
from spec_lab.engine.engine import Engine
from tests.fake_target import PaddedGraph
from tests.lab import PRUNING, Reference, make_config, make_engine, random_requests
from tests.scripted_rule import ScriptedRule, install
from tests.tiny_assistant import FULL, SLIDING, SlowAssistant, make_tiny_assistant
from tests.tiny_checkpoints import Family, make_tiny_target

PAGE = 4
TARGETS: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 5}),
}
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}


@dataclass(frozen=True)
class Case:
    """A target, an assistant for it, and which layers the assistant must read with which windows."""

    target: str
    sources: tuple[int, ...]
    windows: tuple[int | None, ...]
    position: str = "last"
    assistant: dict[str, Any] = field(default_factory=dict)


CASES = {
    "last_full_layer": Case("qwen3", (7, 7), (None, None)),
    "bonus_position": Case("qwen3", (7, 7), (None, None), "bonus"),
    "named_layers": Case("qwen3", (6, 1), (None, None), assistant={"kv_source_layers": [6, 1]}),
    "other_groups": Case("llama_mha", (7, 7), (None, None), assistant={"num_heads": 8}),
    "centroids": Case("qwen3", (7, 7), (None, None), assistant=CENTROIDS),
    "sliding": Case("qwen2_sliding", (7, 4), (5, None), assistant={"layer_types": (SLIDING, FULL)}),
    "sliding_bonus": Case("qwen2_sliding", (7, 4), (6, None), "bonus", assistant={"layer_types": (SLIDING, FULL)}),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    found = {}
    for name, (family, options) in TARGETS.items():
        folder = tmp_path_factory.mktemp(name)
        make_tiny_target(folder, family, **options)
        found[name] = folder, Reference(folder)
    return found


@dataclass
class Lab:
    """An engine whose drafts are compared with the slow model in every round."""

    engine: Engine
    drafter: FrozenKVDrafter
    rule: ScriptedRule
    requests: list[Request]

    def generate(self) -> dict[str, list[list[int]]]:
        """The drafts of each request, by round."""
        self.engine.generate(self.requests)
        return self.rule.drafts


def make_lab(
    targets: dict[str, tuple[Path, Reference]],
    folder: Path,
    case: Case,
    *,
    prune: str = "none",
    num_draft_tokens: int = 3,
    bucket: int = 1,
) -> Lab:
    target, reference = targets[case.target]
    tensors = make_tiny_assistant(folder, read_model_config(target), **case.assistant)
    requests = [
        replace(request, max_new_tokens=12, ignore_eos=True) for request in random_requests(4, lengths=(2, 14), seed=2)
    ]
    requests[0] = replace(requests[0], prompt_ids=(17,))
    config = make_config(
        (target, folder),
        "frozen_kv",
        num_draft_tokens,
        prune,
        batch_size=3,
        cache={"page_size": PAGE, "prefill_chunk": 5},
        options={"position": case.position},
    )
    engine = make_engine(config, requests)
    engine.parts.cache.kv[:, (NULL_PAGE + 1) * PAGE :] = float("nan")
    engine.graph = PaddedGraph(bucket)
    drafter = engine.parts.drafter
    assert isinstance(drafter, FrozenKVDrafter)
    slow = SlowAssistant(
        tensors,
        reference,
        list(case.sources),
        list(case.windows),
        positions_past_last_key={"last": 0, "bonus": 1}[case.position],
        num_clusters=case.assistant.get("centroid_intermediate_top_k", 0),
    )
    return Lab(engine, drafter, install(engine, slow), requests)


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_slow_model(targets: dict[str, tuple[Path, Reference]], tmp_path: Path, case: str) -> None:
    """They are compared after prompts of one token and of several chunks, and after rounds of every n; slots and pages
    are reused.
    """
    prune = list(PRUNING)[list(CASES).index(case) % len(PRUNING)]
    lab = make_lab(targets, tmp_path, CASES[case], prune=prune)
    lab.generate()
    assert set(lab.rule.accepted) == {0, 1, 2, 3} and lab.rule.compared > 40


@pytest.mark.parametrize("num_draft_tokens", [1, 8])
def test_other_numbers_of_drafts(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, num_draft_tokens: int
) -> None:
    """They run with padded rows, and with pruning of every kind in turn."""
    prune = list(PRUNING)[num_draft_tokens % len(PRUNING)]
    case = CASES["sliding" if num_draft_tokens % 2 else "last_full_layer"]
    lab = make_lab(targets, tmp_path, case, prune=prune, num_draft_tokens=num_draft_tokens, bucket=4)
    lab.generate()
    assert len(set(lab.rule.accepted)) > min(num_draft_tokens, 4) and lab.rule.compared > 25


def at_every_catch_up(lab: Lab, probe: Callable[[VerifiedRound], None]) -> None:
    """Call `probe` before the drafter's own first step of each round."""
    catch_up = lab.drafter.catch_up

    def probed(verified: VerifiedRound) -> FrozenState:
        probe(verified)
        return catch_up(verified)

    lab.drafter.catch_up = probed  # type: ignore[method-assign]


def drafts_of(lab: Lab, verified: VerifiedRound) -> torch.Tensor:
    """The drafts [active rows, num_draft_tokens] of a round, without what the test put around the drafter."""
    state = FrozenKVDrafter.catch_up(lab.drafter, verified)
    drafts = collect_drafts(lab.drafter, lab.engine.parts.backend, state)
    assert int(drafts.min()) >= 0 and int(drafts.max()) < lab.engine.parts.target.vocab_size, "padded rows too"
    return drafts[verified.batch.active]


def committed_slots(verified: VerifiedRound) -> torch.Tensor:
    """The cache slots of the positions 0..L + n - 1 of every active row."""
    slots = []
    lengths = verified.batch.kv_lens + verified.verification.num_emitted
    for length, pages, active in zip(lengths.tolist(), verified.batch.page_table, verified.batch.active, strict=True):
        if active:
            slots.append(cache_slots(pages[None], torch.arange(length)[None], PAGE)[0])
    return torch.cat(slots)


def test_a_draft_round_leaves_the_targets_kv_as_it_is(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path
) -> None:
    lab = make_lab(targets, tmp_path, CASES["sliding"], bucket=4)
    kv = lab.engine.parts.cache.kv
    rounds = []

    def probe(verified: VerifiedRound) -> None:
        before = kv.clone()
        drafts_of(lab, verified)
        assert torch.equal(kv.view(torch.int32), before.view(torch.int32))
        rounds.append(verified)

    at_every_catch_up(lab, probe)
    lab.generate()
    assert len(rounds) > 5


def test_what_lies_past_the_committed_length_changes_nothing(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path
) -> None:
    """Rejected rows, rows never written, and those of other requests are all NaN. Padded rows read the scratch page."""
    lab = make_lab(targets, tmp_path, CASES["sliding_bonus"], bucket=4)
    kv = lab.engine.parts.cache.kv
    rejected = []

    def probe(verified: VerifiedRound) -> None:
        expected, before = drafts_of(lab, verified), kv.clone()
        keep = torch.cat((committed_slots(verified), torch.arange(PAGE) + NULL_PAGE * PAGE))
        dropped = torch.ones(kv.shape[1], dtype=torch.bool).index_fill(0, keep, False)
        kv[:, dropped] = float("nan")
        assert torch.equal(drafts_of(lab, verified), expected)
        kv.copy_(before)
        rejected.append(int((verified.verification.num_emitted[verified.batch.active] < 4).sum()))

    at_every_catch_up(lab, probe)
    lab.generate()
    assert sum(rejected) > 5


def test_the_newest_committed_key_is_read(targets: dict[str, tuple[Path, Reference]], tmp_path: Path) -> None:
    """This is the other side of the test above: L + n keys are read, not one less."""
    lab = make_lab(targets, tmp_path, CASES["last_full_layer"])
    kv = lab.engine.parts.cache.kv
    changed = []

    def probe(verified: VerifiedRound) -> None:
        hidden, before = FrozenKVDrafter.catch_up(lab.drafter, verified).hidden, kv.clone()
        last = verified.batch.kv_lens + verified.verification.num_emitted - 1
        kv[:, cache_slots(verified.batch.page_table, last.unsqueeze(1), PAGE).flatten()] = 1.0
        after = FrozenKVDrafter.catch_up(lab.drafter, verified).hidden
        changed.append(bool((hidden - after).abs().amax(dim=1).min() > 1e-4))
        kv.copy_(before)

    at_every_catch_up(lab, probe)
    lab.generate()
    assert changed and all(changed)


@dataclass
class CountingBackend:
    """Counts what the drafter asks of the backend; it may build and attend, nothing else."""

    backend: Any
    built: list[AttentionMetadata] = field(default_factory=list)

    def build(self, **arguments: Any) -> AttentionMetadata:
        self.built.append(self.backend.build(**arguments))
        return self.built[-1]


def test_metadata_is_built_once_a_round_and_never_moved(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path
) -> None:
    lab = make_lab(targets, tmp_path, CASES["bonus_position"], num_draft_tokens=5)
    counting = lab.drafter.backend = CountingBackend(lab.drafter.backend)
    lengths: list[list[int]] = []
    at_every_catch_up(
        lab,
        lambda verified: lengths.append((verified.batch.kv_lens + verified.verification.num_emitted).tolist()),
    )
    result = lab.engine.generate(lab.requests)
    assert len(counting.built) == len(result.rounds) + len(lab.requests)
    of_rounds = [metadata for metadata in counting.built if metadata.seq_lens.tolist() in lengths]
    assert len(of_rounds) >= len(result.rounds) == len(lengths)
    for metadata in counting.built:
        assert metadata.num_queries == 1
        assert metadata.positions.tolist() == metadata.seq_lens.tolist(), "position=bonus stands at L"
    assert not lab.drafter.requirements.catches_up


def test_the_layers_read_are_resolved_at_construction(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path
) -> None:
    lab = make_lab(targets, tmp_path, CASES["named_layers"])
    layers = lab.engine.parts.cache.layers
    assert [cache is layers[index] for cache, index in zip(lab.drafter.caches, (6, 1), strict=True)] == [True, True]


def test_the_targets_hidden_state_matters(targets: dict[str, tuple[Path, Reference]], tmp_path: Path) -> None:
    """It is that of row n - 1 and of no other: a first step from another row would go unseen in the output."""
    lab = make_lab(targets, tmp_path, CASES["last_full_layer"])
    differing = []

    def probe(verified: VerifiedRound) -> None:
        assert verified.features is not None
        expected = drafts_of(lab, verified)
        batch_size, num_rows = verified.verification.tokens.shape
        live = torch.arange(batch_size) * num_rows + verified.verification.num_emitted - 1
        zeroed = verified.features.index_fill(0, live, 0.0)
        differing.append(not torch.equal(drafts_of(lab, replace(verified, features=zeroed)), expected))
        others = torch.full_like(verified.features, float("nan")).index_copy(0, live, verified.features[live])
        assert torch.equal(drafts_of(lab, replace(verified, features=others)), expected)

    at_every_catch_up(lab, probe)
    lab.generate()
    assert sum(differing) > 0.8 * len(differing) > 4


@pytest.mark.parametrize("prune", ["none", "prefill"])
def test_the_first_step_reads_the_last_prompt_row(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, prune: str
) -> None:
    """It is the last row of the last of several chunks, where transformers up to 5.17 took the first. Pruned, that row
    is all there is.
    """
    lab = make_lab(targets, tmp_path, CASES["last_full_layer"], prune=prune)
    ingest = lab.drafter.ingest
    num_rows: list[tuple[int, int]] = []

    def probed(chunk: Any) -> FrozenState | None:
        state = ingest(chunk)
        num_rows.append((chunk.token_ids.shape[0], chunk.features.shape[0]))
        if state is not None:
            read = chunk.ends.live.rows if prune == "none" else slice(None)
            others = torch.full_like(chunk.features, float("nan"))
            others[read] = chunk.features[read]
            again = ingest(replace(chunk, features=others))
            zeroed = ingest(replace(chunk, features=torch.zeros_like(others)))
            assert again is not None and zeroed is not None
            assert torch.equal(again.hidden, state.hidden)
            assert not torch.allclose(zeroed.hidden, state.hidden)
            lab.rule.picker.first(lab.drafter.head, state.hidden, state.rows)
        return state

    lab.drafter.ingest = probed  # type: ignore[method-assign]
    lab.generate()
    assert len(num_rows) > len(lab.requests), "some prompts take several chunks"
    if prune == "none":
        assert all(rows == features for rows, features in num_rows)
    else:
        assert {features for _, features in num_rows} == {0, 1}


def test_padded_rows_are_inert(targets: dict[str, tuple[Path, Reference]], tmp_path: Path) -> None:
    """Every request has the same drafts in every round, whatever stands beside it; outputs would hide wrong drafts."""
    alone, padded = (make_lab(targets, tmp_path, CASES["sliding"], bucket=bucket).generate() for bucket in (1, 4))
    assert padded == alone
    assert sum(map(len, alone.values())) > 12
